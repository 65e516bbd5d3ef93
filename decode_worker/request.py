"""An accepted sequence of a decode worker, and the transfers that such sequences wait for."""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from common.ids import BlockId, RequestId, TransferId
from common.messages import Offer, Plan
from decode_worker.outbox import Outbox
from kvstore.sequence import Sequence

PLAN_WAIT_S = 2.0
"""An offer waits this long for its plan: they come from two processes, and the offer may be the faster one."""

_NUM_REMEMBERED = 1024
"""So many transfers that are over are remembered, so that a late offer of one is refused at once."""


@dataclass(slots=True, eq=False)
class Request:
    """One accepted sequence and where its answer goes. Owned by the decode engine."""

    request_id: RequestId
    sequence: Sequence
    outbox: Outbox
    transfer_id: TransferId | None = None
    offer: Offer | None = None
    pull: asyncio.Task[None] | None = None
    plan: Plan | None = None
    """The plan that holds."""
    cache_salt: str = ""
    is_replay: bool = False
    """Its cache hits are counted already."""
    fetched_tokens: int = 0
    """Tokens of the prefix that were just pulled from a peer."""
    ready_at: float | None = None
    """When it lacked nothing but room to begin; monotonic seconds."""
    started: bool = False
    gone: bool = False
    """Finished, aborted or failed; only its blocks are still waited for."""
    quarantined: list[BlockId] = field(default_factory=list)
    """Blocks that a stopped pull may still write to."""

    @property
    def wants_kv(self) -> bool:
        """Whether anything follows the token that a prefill worker samples."""
        return self.sequence.num_output_tokens + 1 < self.sequence.sampling.max_tokens


class ExpectedTransfers:
    """The requests by the transfer that their remote plan named. Owned by the decode engine."""

    def __init__(self) -> None:
        self._requests: dict[TransferId, Request] = {}
        self._past: deque[TransferId] = deque(maxlen=_NUM_REMEMBERED)
        self._changed = asyncio.Event()

    def add(self, transfer_id: TransferId, request: Request) -> None:
        """A plan has named the transfer."""
        self._requests[transfer_id] = request
        self._notify()

    def remove(self, transfer_id: TransferId) -> None:
        """Nobody expects the transfer any more."""
        if self._requests.pop(transfer_id, None) is not None:
            self._past.append(transfer_id)
            self._notify()

    async def find(self, transfer_id: TransferId) -> Request | None:
        """Return the request that expects the transfer, once its plan is here; None when none is or comes."""
        try:
            async with asyncio.timeout(PLAN_WAIT_S):
                while transfer_id not in self._requests and transfer_id not in self._past:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._requests.get(transfer_id)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

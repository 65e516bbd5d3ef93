"""One transfer at its source: how far its blocks are computed, and what a puller may have of them now.

    opened ──advance──▶ ... ──hand_over──▶ complete ──▶ ended (done, cancelled, expired, closed or failed)
    opened ──lend──▶ complete ──▶ ended     a cached prefix: whole blocks, and no token after them

It may end at any moment; from then on nothing more is read from its blocks, and what its engine still says is ignored.
"""

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import BatonError, InvalidRequest, from_detail, to_detail
from common.ids import BlockId, TransferId
from common.messages import Handover


class ReleaseReason(enum.StrEnum):
    """Why a transfer ended and its blocks came back."""

    DONE = "done"  # the puller has checked everything it wanted
    CANCELLED = "cancelled"  # the puller does not want it any more
    EXPIRED = "expired"  # nobody renewed the lease
    CLOSED = "closed"  # its engine closed it
    FAILED = "failed"  # its engine could not compute it


@dataclass(frozen=True, slots=True)
class FrameSpan:
    """Whole blocks that can be sent now, and the tokens that they cover."""

    token_start: int
    token_end: int
    block_ids: tuple[BlockId, ...]


class Outgoing:
    """The progress of one transfer. Owned by the transfer server; its engine reports to it, on the event loop."""

    def __init__(
        self,
        transfer_id: TransferId,
        generation: int,
        block_ids: Sequence[BlockId],
        block_size: int,
        on_fail: Callable[["Outgoing", BatonError], None],
    ) -> None:
        self.transfer_id = transfer_id
        self.generation = generation
        self.handover: Handover | None = None
        self.error: BatonError | None = None
        """Why it ended, as a puller is told; None while it lives."""
        self._block_ids = tuple(block_ids)
        self._block_size = block_size
        self._num_computed = 0
        self._is_lent = False
        self._on_fail = on_fail
        self._changed = asyncio.Event()

    @property
    def num_slots(self) -> int:
        """Tokens for which the transfer has room."""
        return len(self._block_ids) * self._block_size

    def advance(self, num_tokens: int) -> None:
        """Say that the KV of the first ``num_tokens`` is in place; fewer than before is ignored."""
        if self.error is not None:
            return
        if num_tokens > self.num_slots:
            raise ValueError(f"{num_tokens} tokens do not fit the transfer's {self.num_slots} slots")
        if num_tokens > self._num_computed:
            self._num_computed = num_tokens
            self._notify()

    def hand_over(self, handover: Handover) -> None:
        """Give the next token; the KV of all ``handover.num_tokens`` tokens is in place."""
        if self.error is not None:
            return
        if self.handover is not None or handover.transfer_id != self.transfer_id:
            raise ValueError(f"transfer {self.transfer_id} cannot take this handover")
        self.advance(handover.num_tokens)
        self.handover = handover
        self._notify()

    def lend(self) -> None:
        """Say that all blocks are in place and that nothing else will come."""
        self._is_lent = True
        self.advance(self.num_slots)

    def fail(self, error: BatonError) -> None:
        """End it: the blocks are released at once and a puller, now or soon, gets ``error``."""
        if self.error is None:
            self._on_fail(self, error)

    def end(self, error: BatonError) -> None:
        """Stop all reading; streams that run raise ``error``. For the transfer server only."""
        self.error = error
        self._notify()

    def raise_if_ended(self) -> None:
        """Raise the error that the transfer ended with, if it has ended."""
        if self.error is not None:
            raise fresh(self.error)

    def check_start(self, have_tokens: int) -> None:
        """Raise InvalidRequest unless a pull may begin after ``have_tokens``: whole blocks, or all tokens."""
        if have_tokens < 0 or have_tokens > (self.handover.num_tokens if self.handover else self.num_slots):
            raise InvalidRequest(f"the transfer does not cover {have_tokens} tokens", param="have_tokens")
        if self.handover is not None and have_tokens % self._block_size and have_tokens != self.handover.num_tokens:
            raise InvalidRequest(
                f"have_tokens must be a multiple of {self._block_size} or all tokens, not {have_tokens}",
                param="have_tokens",
            )

    def next_span(self, num_sent: int, max_blocks: int) -> FrameSpan | None:
        """Return what can follow the first ``num_sent`` tokens now, or None when that must be waited for.

        Only full blocks while the prompt is being computed; the partly filled last one once it is done.
        """
        if num_sent % self._block_size:  # the puller says that it has all tokens; the handover will tell
            return None
        ready = self.handover.num_tokens if self.handover else self._num_computed // self._block_size * self._block_size
        token_end = min(ready, num_sent + max_blocks * self._block_size)
        if token_end <= num_sent:
            return None
        first, past = num_sent // self._block_size, -(-token_end // self._block_size)
        return FrameSpan(num_sent, token_end, self._block_ids[first:past])

    def is_served(self, num_sent: int) -> bool:
        """Say whether a puller that has ``num_sent`` tokens and the handover, if there is one, needs nothing more."""
        if self._is_lent:
            return num_sent >= self.num_slots
        return self.handover is not None and (not self.handover.has_kv or num_sent >= self.handover.num_tokens)

    async def wait_changed(self) -> None:
        """Wait until it advances, is handed over or ends."""
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def fresh(error: BatonError) -> BatonError:
    """Return an equal error to raise; raising a remembered one would keep the frames that it passed alive with it."""
    return from_detail(to_detail(error))

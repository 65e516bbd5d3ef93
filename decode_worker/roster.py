"""Who is here: the requests of a decode worker and their sequences, from their acceptance until their blocks are given
back.

A request that is over may stay as ``gone`` while a pull can still write to its blocks. Of several samples of a prompt,
only the prompt is here, as a sequence of its own, until they fork from it.
"""

import asyncio
from collections.abc import Iterable

from common.ids import RequestId
from common.messages import SequenceReport
from decode_worker.request import Request
from decode_worker.scheduler import DecodeScheduler
from decode_worker.swap import SwapSpace
from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockTable
from kvstore.host.stepper import Stepper
from kvstore.sequence import Sequence


class Roster:
    """Owns the requests, and tells the scheduler which sequences there are. ``wake`` is set when blocks go back."""

    def __init__(
        self, pool: BlockPool, scheduler: DecodeScheduler, stepper: Stepper, swap: SwapSpace, wake: asyncio.Event
    ) -> None:
        self._pool = pool
        self._scheduler = scheduler
        self._stepper = stepper
        self._swap = swap
        self._wake = wake
        self._requests: dict[RequestId, Request] = {}
        self._by_sequence: dict[Sequence, Request] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._all_released = asyncio.Event()
        self._all_released.set()

    # ---- who is here ----

    @property
    def num_requests(self) -> int:
        """Requests that are not over."""
        return len(self._requests)

    def requests(self) -> list[Request]:
        """Return the requests that are not over."""
        return list(self._requests.values())

    def get(self, request_id: RequestId) -> Request | None:
        """Return the request if it is here and not over."""
        return self._requests.get(request_id)

    def owner(self, sequence: Sequence) -> Request:
        """Return the request of ``sequence``, which must be here."""
        return self._by_sequence[sequence]

    def find_owner(self, sequence: Sequence) -> Request | None:
        """Return the request of ``sequence`` if that is here."""
        return self._by_sequence.get(sequence)

    def sequences_of(self, request: Request) -> list[Sequence]:
        """Return the request's sequences that are here: the first, or the samples or beams that have forked from it."""
        return [sequence for sequence in request.sequences() if sequence in self._by_sequence]

    def tables(self) -> list[BlockTable]:
        """Return every table that holds blocks."""
        return [*(sequence.table for sequence in self._by_sequence), *self._stepper.leaving()]

    def reports(self) -> list[SequenceReport]:
        """Return every sequence with its stage; one that only waits for a pull to end is ``leaving``."""
        return [
            SequenceReport(
                sequence.request_id,
                "leaving" if request.gone else self._scheduler.stage(sequence).name.lower(),
                sequence.num_tokens,
                sequence.num_computed_tokens,
                len(sequence.table.block_ids),
            )
            for sequence, request in self._by_sequence.items()
        ]

    async def wait_empty(self) -> None:
        """Return when every request is over."""
        await self._empty.wait()

    async def wait_released(self) -> None:
        """Return when no sequence is here, and so none holds a block."""
        await self._all_released.wait()

    # ---- coming ----

    def add(self, request: Request) -> None:
        """Take a new request, with the sequence that is pulled or computed first."""
        self._requests[request.request_id] = request
        self._by_sequence[request.sequence] = request
        self._empty.clear()
        self._all_released.clear()
        self._scheduler.add(request.sequence)

    def adopt(self, request: Request, sequences: Iterable[Sequence]) -> None:
        """Take sequences that have forked from one of the request's."""
        self._by_sequence |= dict.fromkeys(sequences, request)

    # ---- going ----

    def retire(self, request: Request) -> None:
        """The request is over: nothing of it is scheduled any more. Its blocks stay until :meth:`release`."""
        request.gone = True
        del self._requests[request.request_id]
        for sequence in self.sequences_of(request):
            self._scheduler.retire(sequence)
        if not self._requests:
            self._empty.set()

    def release(self, request: Request) -> None:
        """Nothing but a step can write to the blocks of a request that is over: forget its sequences."""
        for sequence in self.sequences_of(request):
            self.drop(sequence)
        self._pool.end_quarantine(request.quarantined)

    def drop(self, sequence: Sequence) -> None:
        """Forget a sequence, and give its blocks back when no step can write to them."""
        self._scheduler.retire(sequence)
        del self._by_sequence[sequence]
        self._swap.drop(sequence)
        self._stepper.release(sequence.table, sequence)
        if not self._by_sequence:
            self._all_released.set()
        self._wake.set()

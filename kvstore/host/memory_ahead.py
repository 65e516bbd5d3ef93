"""Memory for the blocks that are handed out next, taken from the system while there is nothing else to do.

A pool's memory is only taken when it is first written to, so a worker that is asked for little stays small. But then a
prompt pays for the memory of its blocks while it is computed. So some of it is always taken ahead.
"""

import asyncio
from collections.abc import Sequence
from functools import partial

from common.ids import BlockId
from kvstore.block_pool import BlockPool
from kvstore.host.compute_thread import ComputeThread
from kvstore.storage import KvStorage

AHEAD_BYTES = 64 << 20
"""So much is taken ahead at most."""

PIECE_BYTES = 2 << 20
"""Taken in one go, or one block if that is more: work that comes meanwhile waits about a millisecond for it."""


class MemoryAhead:
    """Remembers which blocks have their memory. Used on the event loop; memory is taken on the compute thread."""

    def __init__(self, pool: BlockPool, storage: KvStorage, compute: ComputeThread) -> None:
        self._pool = pool
        self._storage = storage
        self._compute = compute
        block_bytes = storage.layout.block_bytes
        self._num_blocks = AHEAD_BYTES // block_bytes if storage.device.type == "cpu" else 0
        self._num_in_piece = max(1, PIECE_BYTES // block_bytes)
        self._taken: set[BlockId] = set()

    async def take(self, work: asyncio.Event) -> None:
        """Return when the next blocks have their memory, or soon after ``work`` is set."""
        while not work.is_set() and (block_ids := self._lacking()):
            await self._compute.call(partial(self._storage.populate, block_ids))
            self._taken.update(block_ids)

    def _lacking(self) -> Sequence[BlockId]:
        """Return the first of the next blocks that lack memory, as many as are one piece."""
        lacking = [block_id for block_id in self._pool.next_free(self._num_blocks) if block_id not in self._taken]
        return lacking[: self._num_in_piece]

"""Keeps a worker's entries in the prefix index as its pool changes: soon after each change, in batches.

Redis away costs nothing but the index; when it is back, or was flushed or restarted, everything is written anew.
"""

import asyncio
import logging

from redis.asyncio import Redis

from common.ids import Epoch, WorkerId
from common.redis_client import RedisUnavailable
from kvstore.block_pool import BlockPool
from kvstore.closed_prefixes import ClosedPrefixes
from kvstore.prefix_index import INDEX_TTL_S, PrefixIndexWriter

log = logging.getLogger(__name__)

GATHER_S = 0.02
"""Changes within this time travel together."""

RENEW_S = INDEX_TTL_S / 4
"""Without changes, the time to live is renewed this often."""

RETRY_S = 0.5
"""Pause after Redis did not answer."""


class IndexPublisher:
    """Follows one pool, as its only follower. Runs on the event loop."""

    def __init__(self, redis: Redis, worker_id: WorkerId, epoch: Epoch, pool: BlockPool) -> None:
        self.num_rewrites = 0
        """Times that everything was written anew, the first included."""
        self.num_blocks_written = 0
        self._pool = pool
        self._writer = PrefixIndexWriter(redis, worker_id, epoch)
        self._prefixes = ClosedPrefixes()
        self._changed = asyncio.Event()
        pool.drain_cache_events()  # of the life before; the pool may have been filled by one
        self._prefixes.restart(pool.cached_entries())
        pool.on_cache_change(self._changed.set)

    async def run(self) -> None:
        """Publish until cancelled."""
        is_intact = False
        while True:
            try:
                is_intact = await self._publish(is_intact)
            except RedisUnavailable:  # the heartbeat says so in the log
                is_intact = False
                await asyncio.sleep(RETRY_S)
            if is_intact:
                await self._wait_changed()

    async def withdraw(self) -> None:
        """Remove all entries at the end of an orderly shutdown."""
        try:
            await self._writer.delete()
        except RedisUnavailable as error:
            log.warning("the prefix index was not cleared, its entries will expire: %s", error)

    @property
    def num_blocks(self) -> int:
        """Blocks that others can find here."""
        return len(self._prefixes)

    async def _publish(self, is_intact: bool) -> bool:
        """Write what has changed, or everything; return whether the index is known to be complete now."""
        self._follow()
        told = self._prefixes.take()
        if is_intact:
            self.num_blocks_written += len(told.stored)
            return await self._writer.update(told.stored, told.removed)
        everything = self._prefixes.told()
        self.num_rewrites += 1
        self.num_blocks_written += len(everything)
        await self._writer.rewrite(everything)
        return True

    def _follow(self) -> None:
        drained = self._pool.drain_cache_events()
        if drained.complete:
            self._prefixes.apply(drained.events)
        else:
            self._prefixes.restart(self._pool.cached_entries())

    async def _wait_changed(self) -> None:
        """Wait for a change and then for those that come with it, or until it is time to renew."""
        try:
            async with asyncio.timeout(RENEW_S):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()
        await asyncio.sleep(GATHER_S)

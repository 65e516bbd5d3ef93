"""Reads this worker's prefill queue in Redis, as long as there is room, through outages and flushes."""

import asyncio
import logging
from collections.abc import Callable

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from common import queue
from common.ids import Epoch, WorkerId
from common.messages import Prefill
from common.redis_client import RedisUnavailable

log = logging.getLogger(__name__)

BLOCK_S = 1.0
"""One read waits this long for an entry."""

RETRY_S = 0.5
"""Pause after a read that failed."""

MAX_READ = 64
"""Entries of one read at most."""

Accept = Callable[[bytes, Prefill], None]
"""Takes an entry's id and what it asks for."""


class Intake:
    """Owns the reading end of one queue."""

    def __init__(self, redis: Redis, worker_id: WorkerId, epoch: Epoch) -> None:
        self._redis = redis
        self._worker_id = worker_id
        self._epoch = epoch
        self._has_room = asyncio.Event()
        self.num_resets = 0
        """How often the queue was gone and had to be made again."""
        self._finished: list[bytes] = []
        self._is_made = False
        self._closed = False

    def made_room(self) -> None:
        """Say that there may be more room."""
        self._has_room.set()

    def finished(self, entry_id: bytes) -> None:
        """The entry was handed over or dropped; it is acknowledged with the next read."""
        self._finished.append(entry_id)

    def close(self) -> None:
        """Read nothing more; :meth:`run` goes on acknowledging."""
        self._closed = True

    async def run(self, accept: Accept, room: Callable[[], int]) -> None:
        """Read until cancelled. ``accept`` is called for every entry; ``room`` says how many more may come."""
        healthy = False
        while True:
            try:
                if not healthy:
                    await self._begin(accept)
                    healthy = True
                await self._acknowledge()
                await self._read(accept, room)
            except RedisUnavailable as error:
                if healthy and not _is_flushed(error):
                    log.warning("the prefill queue cannot be read: %s", error)
                healthy = False
                await asyncio.sleep(RETRY_S)

    async def delete(self) -> None:
        """Remove the queue; what is left in it was given to others by the gateways."""
        try:
            await queue.delete(self._redis, self._worker_id, self._epoch)
        except RedisUnavailable as error:
            log.warning("the queue was not removed, it will expire: %s", error)

    async def _begin(self, accept: Accept) -> None:
        is_new = await queue.create(self._redis, self._worker_id, self._epoch)
        self.num_resets += is_new and self._is_made
        self._is_made = True
        for entry_id, task in await queue.pending(self._redis, self._worker_id, self._epoch):
            if entry_id not in self._finished:  # the read that brought it may have failed on the way back
                accept(entry_id, task)
        log.info("reading the prefill queue")

    async def _read(self, accept: Accept, room: Callable[[], int]) -> None:
        count = 0 if self._closed else min(room(), MAX_READ)
        if count <= 0:
            self._has_room.clear()
            try:
                async with asyncio.timeout(BLOCK_S):
                    await self._has_room.wait()
            except TimeoutError:
                pass
            return
        for entry_id, task in await queue.take(self._redis, self._worker_id, self._epoch, count=count, block_s=BLOCK_S):
            accept(entry_id, task)

    async def _acknowledge(self) -> None:
        if self._finished:
            finished = list(self._finished)
            await queue.acknowledge(self._redis, self._worker_id, self._epoch, finished)
            del self._finished[: len(finished)]


def _is_flushed(error: Exception) -> bool:
    return isinstance(error, ResponseError) and "NOGROUP" in str(error)

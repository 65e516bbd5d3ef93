"""The prefill queues: one Redis stream for each worker and epoch, read through a consumer group.

An entry stays pending until the prompt has been handed over, so a queue's length is the work that its worker still
owes. Keys carry the epoch: what was queued for a dead life of a worker is never taken up by the next. Streams expire.
Every function is bounded in time and raises one of RedisUnavailable when Redis does not do its part. An entry that was
damaged on its way or in Redis is dropped: its gateway asks somebody else when nobody begins with it.
"""

import logging
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from common.errors import InvalidRequest
from common.ids import Epoch, WorkerId
from common.messages import Prefill
from common.redis_client import CALL_TIMEOUT_S, calling
from common.wire import decode_sealed, encode_sealed

log = logging.getLogger(__name__)

GROUP = "prefill"
_FIELD = b"m"
_TTL_S = 600


def stream_key(worker_id: WorkerId, epoch: Epoch) -> str:
    """Return the key of a worker's queue."""
    return f"baton:prefill:{worker_id}:{epoch}"


async def push(redis: Redis, worker_id: WorkerId, epoch: Epoch, task: Prefill) -> None:
    """Append ``task``."""
    key = stream_key(worker_id, epoch)
    pipe = redis.pipeline(transaction=False)
    pipe.xadd(key, {_FIELD: encode_sealed(task)})
    pipe.expire(key, _TTL_S)
    async with calling(redis):
        await pipe.execute()


async def create(redis: Redis, worker_id: WorkerId, epoch: Epoch) -> bool:
    """Make the worker's queue and its group; return whether they were not there. Safe to call again."""
    try:
        async with calling(redis):
            await redis.xgroup_create(stream_key(worker_id, epoch), GROUP, id="0", mkstream=True)
    except ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
        return False
    return True


async def pending(redis: Redis, worker_id: WorkerId, epoch: Epoch) -> list[tuple[bytes, Prefill]]:
    """Return what was taken and is not acknowledged, so that an answer that got lost is read again."""
    async with calling(redis):
        return _entries(await redis.xreadgroup(GROUP, worker_id, {stream_key(worker_id, epoch): "0"}))


async def take(
    redis: Redis, worker_id: WorkerId, epoch: Epoch, *, count: int, block_s: float
) -> list[tuple[bytes, Prefill]]:
    """Wait up to ``block_s`` for up to ``count`` entries; return (entry id, task) for each.

    Raises ResponseError with NOGROUP when the stream was flushed: then call :func:`create` again.
    """
    key = stream_key(worker_id, epoch)
    async with calling(redis, block_s + CALL_TIMEOUT_S):
        return _entries(await redis.xreadgroup(GROUP, worker_id, {key: ">"}, count=count, block=int(block_s * 1000)))


async def acknowledge(redis: Redis, worker_id: WorkerId, epoch: Epoch, entry_ids: list[bytes]) -> None:
    """Take finished entries off the queue."""
    key = stream_key(worker_id, epoch)
    pipe = redis.pipeline(transaction=False)
    pipe.xack(key, GROUP, *entry_ids)
    pipe.xdel(key, *entry_ids)
    pipe.expire(key, _TTL_S)
    async with calling(redis):
        await pipe.execute()


async def delete(redis: Redis, worker_id: WorkerId, epoch: Epoch) -> None:
    """Remove the queue of a life that ends."""
    async with calling(redis):
        await redis.delete(stream_key(worker_id, epoch))


def _entries(reply: Any) -> list[tuple[bytes, Prefill]]:
    entries: list[tuple[bytes, Prefill]] = []
    for entry_id, fields in reply[0][1] if reply else []:
        try:
            entries.append((entry_id, decode_sealed(fields[_FIELD], Prefill)))
        except (InvalidRequest, KeyError) as error:
            log.warning("queue entry %r is dropped, it cannot be read: %s", entry_id, error)
    return entries

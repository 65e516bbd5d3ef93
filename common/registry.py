"""Who is in the cluster: one record a worker in Redis, with a time to live that its heartbeat renews.

``baton:worker:{id}`` holds the msgpack of a WorkerRecord, sealed with a checksum. A worker that dies is gone after
``RECORD_TTL_S``. Redis away means no news, not no cluster: a reader keeps its last view and lets its own connections
say who is alive. Every function is bounded in time and raises one of RedisUnavailable when Redis does not do its
part.
"""

import logging
from typing import Any

from redis.asyncio import Redis

from common.errors import InvalidRequest
from common.ids import WorkerId
from common.messages import WorkerRecord
from common.redis_client import calling
from common.wire import decode_sealed, encode_sealed

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""A worker refreshes its record this often."""

RECORD_TTL_S = 4.0
"""A record that is not refreshed for this long disappears."""

_PREFIX = "baton:worker:"


async def publish(redis: Redis, record: WorkerRecord) -> None:
    """Write ``record`` and renew its time to live."""
    async with calling(redis):
        await redis.set(_PREFIX + record.worker_id, encode_sealed(record), px=int(RECORD_TTL_S * 1000))


async def withdraw(redis: Redis, worker_id: WorkerId) -> None:
    """Remove a worker's record at the end of an orderly shutdown."""
    async with calling(redis):
        await redis.delete(_PREFIX + worker_id)


async def members(redis: Redis) -> list[WorkerRecord]:
    """Return all live records, by worker id; logs and leaves out what it cannot read."""
    async with calling(redis):
        keys = sorted([key async for key in redis.scan_iter(match=_PREFIX + "*", count=500)])
        values: Any = await redis.mget(keys) if keys else []
    records: list[WorkerRecord] = []
    for key, value in zip(keys, values, strict=True):
        if value is None:  # expired between the two calls
            continue
        try:
            records.append(decode_sealed(value, WorkerRecord))
        except InvalidRequest as error:
            log.warning("record %s is not readable: %s", key, error)
    return records

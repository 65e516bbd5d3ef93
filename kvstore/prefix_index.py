"""The cluster's index of cached prefixes in Redis: which worker holds which blocks, by content hash.

``baton:prefix:{worker}:{epoch}`` is a Redis hash {block hash -> block id} of one life of one worker. Two rules make it
cheap to ask and impossible to leave behind:

- It is prefix-closed: a block is in it only while every block before it in its chain is (see
  :mod:`kvstore.closed_prefixes`). So how deep a worker holds a prompt is found by bisection, not block by block.
- It has a time to live that its worker renews. A dead life's entries are gone with its record, and readers only ask
  about the lives that the registry names.

Advisory: the owner checks and pins its own blocks, so a wrong entry costs a recomputation and never a wrong token. Only
hashes and block ids are stored, never KV. Every function is bounded in time and raises one of RedisUnavailable when
Redis does not do its part.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from redis.asyncio import Redis

from common.ids import BlockHash, BlockId, Epoch, WorkerId
from common.redis_client import CALL_TIMEOUT_S, calling
from kvstore.prefix_hash import DIGEST_BYTES, join_chain

INDEX_TTL_S = 4.0
"""A life's entries disappear when they are not renewed for this long."""

BATCH_FIELDS = 1000
"""Entries that one command carries at most."""

_COMPLETE = b"complete"
"""Field that says that everything before it was written; no block hash has this length."""

# ARGV[1] is the chain's hashes, one after the other. Returns for each key how many leading hashes it holds: doubling
# steps find an interval, bisection the end in it.
_DEPTHS = f"""
local chain, num = ARGV[1], #ARGV[1] / {DIGEST_BYTES}
local function holds(key, n)
    return redis.call('HEXISTS', key, string.sub(chain, (n - 1) * {DIGEST_BYTES} + 1, n * {DIGEST_BYTES})) == 1
end
local depths = {{}}
for index, key in ipairs(KEYS) do
    local held, missing = 0, 1
    while missing <= num and holds(key, missing) do
        held, missing = missing, missing * 2
    end
    missing = math.min(missing, num + 1)
    while missing - held > 1 do
        local middle = math.floor((held + missing) / 2)
        if holds(key, middle) then held = middle else missing = middle end
    end
    depths[index] = held
end
return depths
"""


def index_key(worker_id: WorkerId, epoch: Epoch) -> str:
    """Return the key of one life's entries."""
    return f"baton:prefix:{worker_id}:{epoch}"


class PrefixIndex:
    """Reads the index."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._depths = redis.register_script(_DEPTHS)

    async def depths(self, chain: Sequence[BlockHash], lives: Sequence[tuple[WorkerId, Epoch]]) -> list[int]:
        """Return for each life how many leading blocks of ``chain`` it holds; one round trip."""
        if not chain or not lives:
            return [0] * len(lives)
        async with calling(self._redis):
            found: list[int] = await self._depths([index_key(*life) for life in lives], [join_chain(chain)])
        return found

    async def holders(
        self, block_hashes: Sequence[BlockHash], lives: Sequence[tuple[WorkerId, Epoch]]
    ) -> list[list[WorkerId]]:
        """Return for each hash the workers that hold its block."""
        if not block_hashes or not lives:
            return [[] for _ in block_hashes]
        pipe = self._redis.pipeline(transaction=False)
        for life in lives:
            pipe.hmget(index_key(*life), list(block_hashes))
        async with calling(self._redis):
            rows: list[list[Any]] = await pipe.execute()
        return [
            [worker_id for (worker_id, _), row in zip(lives, rows, strict=True) if row[column] is not None]
            for column in range(len(block_hashes))
        ]

    async def sizes(self, lives: Sequence[tuple[WorkerId, Epoch]]) -> list[int]:
        """Return for each life how many blocks the index names."""
        if not lives:
            return []
        pipe = self._redis.pipeline(transaction=False)
        for life in lives:
            pipe.hlen(index_key(*life))
        async with calling(self._redis):
            lengths: list[int] = await pipe.execute()
        return [max(0, length - 1) for length in lengths]


class PrefixIndexWriter:
    """Writes one life's entries. Owned by its worker."""

    def __init__(self, redis: Redis, worker_id: WorkerId, epoch: Epoch) -> None:
        self._redis = redis
        self._key = index_key(worker_id, epoch)

    async def update(self, stored: Mapping[BlockHash, BlockId], removed: Sequence[BlockHash]) -> bool:
        """Apply a batch and renew the time to live, in one round trip.

        Returns False when the index was lost meanwhile (Redis was restarted or flushed, or the entries expired): then
        call :meth:`rewrite`.
        """
        pipe = self._redis.pipeline(transaction=False)
        pipe.hexists(self._key, _COMPLETE)
        for batch in _batches(removed):
            pipe.hdel(self._key, *batch)
        self._set(pipe, stored)
        pipe.pexpire(self._key, int(INDEX_TTL_S * 1000))
        async with calling(self._redis):
            is_complete, *_ = await pipe.execute()
        return bool(is_complete)

    async def rewrite(self, stored: Mapping[BlockHash, BlockId]) -> None:
        """Replace whatever is there by ``stored``."""
        pipe = self._redis.pipeline(transaction=False)
        pipe.unlink(self._key)
        self._set(pipe, stored)
        pipe.hset(self._key, _COMPLETE, 1)
        pipe.pexpire(self._key, int(INDEX_TTL_S * 1000))
        async with calling(self._redis, CALL_TIMEOUT_S + len(stored) / 50_000):
            await pipe.execute()

    async def delete(self) -> None:
        """Remove all entries, at the end of an orderly shutdown."""
        async with calling(self._redis):
            await self._redis.unlink(self._key)

    def _set(self, pipe: Any, stored: Mapping[BlockHash, BlockId]) -> None:
        for batch in _batches(list(stored)):
            pipe.hset(self._key, items=[part for block_hash in batch for part in (block_hash, stored[block_hash])])


def _batches(block_hashes: Sequence[BlockHash]) -> list[list[BlockHash]]:
    source = iter(block_hashes)
    return [list(islice(source, BATCH_FIELDS)) for _ in range(0, len(block_hashes), BATCH_FIELDS)]

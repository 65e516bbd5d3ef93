"""The prefix index on a real Redis: depths, what a worker publishes, and what losses of Redis do to it."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
from redis.asyncio import Redis

from common.ids import BlockHash, BlockId, Epoch, WorkerId
from kvstore.block_pool import BlockPool
from kvstore.host.index_publisher import IndexPublisher
from kvstore.prefix_index import INDEX_TTL_S, PrefixIndex, PrefixIndexWriter, index_key

pytestmark = pytest.mark.anyio

LIFE = (WorkerId("w"), Epoch(7))


def chain(length: int, seed: int = 0) -> list[BlockHash]:
    return [BlockHash(random.Random(f"{seed}/{at}").randbytes(16)) for at in range(length)]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 100])
async def test_depth_is_exact_for_every_prefix(redis: Redis, length: int):
    hashes = chain(length)
    writer, index = PrefixIndexWriter(redis, *LIFE), PrefixIndex(redis)
    await writer.rewrite({})
    for held in range(length + 1):
        assert await index.depths(hashes, [LIFE]) == [held]
        await writer.update({found: BlockId(1) for found in hashes[held : held + 1]}, [])


async def test_each_life_has_its_own_depth_and_other_epochs_none(redis: Redis):
    hashes = chain(2500)
    lives = [(WorkerId(name), Epoch(1)) for name in "abc"]
    for life, depth in zip(lives, (2500, 17, 0), strict=True):
        await PrefixIndexWriter(redis, *life).rewrite(dict.fromkeys(hashes[:depth], BlockId(3)))
    index = PrefixIndex(redis)
    assert await index.depths(hashes, [*lives, (WorkerId("a"), Epoch(2))]) == [2500, 17, 0, 0]
    assert await index.depths(hashes[:5], lives) == [5, 5, 0]
    assert await index.depths([], lives) == [0, 0, 0]
    assert await index.sizes(lives) == [2500, 17, 0]
    assert await index.holders([hashes[16], hashes[17], chain(1, seed=9)[0]], lives) == [["a", "b"], ["a"], []]


async def test_entries_expire_with_their_worker(redis: Redis):
    await PrefixIndexWriter(redis, *LIFE).rewrite(dict.fromkeys(chain(3), BlockId(0)))
    assert 0 < await redis.pttl(index_key(*LIFE)) <= INDEX_TTL_S * 1000


@pytest.fixture
async def published(redis: Redis) -> AsyncIterator[BlockPool]:
    pool = BlockPool(64, 16)
    publisher = IndexPublisher(redis, *LIFE, pool)
    task = asyncio.create_task(publisher.run())
    yield pool
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await publisher.withdraw()
    assert not await redis.exists(index_key(*LIFE))


async def store(pool: BlockPool, hashes: list[BlockHash]) -> None:
    block_ids = pool.allocate(len(hashes))
    for at, block_hash in enumerate(hashes):
        pool.publish(block_ids[at], block_hash, parent=hashes[at - 1] if at else None)
    pool.release(block_ids)


async def until(redis: Redis, hashes: list[BlockHash], expected: Callable[[int], bool]) -> None:
    async with asyncio.timeout(20):
        while not expected((await PrefixIndex(redis).depths(hashes, [LIFE]))[0]):  # noqa: ASYNC110 - seen from outside
            await asyncio.sleep(0.01)


async def test_what_a_pool_caches_can_be_found_until_it_is_evicted(redis: Redis, published: BlockPool):
    hashes = chain(40)
    await store(published, hashes)
    await until(redis, hashes, lambda depth: depth == 40)
    held = published.allocate(34)  # 24 were free: evicts the last ten
    await until(redis, hashes, lambda depth: depth == 30)
    published.release(held)
    published.reset_cache()
    await until(redis, hashes, lambda depth: depth == 0)


async def test_a_gap_in_a_chain_ends_the_match(redis: Redis, published: BlockPool):
    hashes = chain(4)
    await store(published, hashes)
    await until(redis, hashes, lambda depth: depth == 4)
    published.pin_prefix(hashes)
    published.withdraw(published.cached_blocks()[hashes[1]])
    await until(redis, hashes, lambda depth: depth == 1)


async def test_a_flush_of_redis_is_noticed_and_everything_is_published_again(redis: Redis, published: BlockPool):
    hashes = chain(40)
    await store(published, hashes)
    await until(redis, hashes, lambda depth: depth == 40)
    await redis.flushall()
    await store(published, chain(2, seed=1))  # a change alone must not make a half-empty index look whole
    await until(redis, hashes, lambda depth: depth == 40)
    await redis.flushall()
    await until(redis, hashes, lambda depth: depth == 40)

"""What is told of a cache is prefix-closed, complete, and never stale, whatever order blocks come and go in."""

from hypothesis import given
from hypothesis import strategies as st

from common.ids import BlockHash, BlockId
from kvstore.block_pool import CacheEntry
from kvstore.cache_log import CacheChange, CacheEvent
from kvstore.closed_prefixes import ClosedPrefixes

PARENTS: dict[int, int | None] = {0: None, 1: 0, 2: 1, 3: 2, 4: 1, 5: None, 6: 5, 7: 4}


def h(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


def parent(number: int) -> BlockHash | None:
    before = PARENTS[number]
    return None if before is None else h(before)


def event(change: CacheChange, number: int, block_id: int) -> CacheEvent:
    return CacheEvent(change, h(number), BlockId(block_id), parent(number))


def closed(cached: dict[int, int]) -> dict[BlockHash, BlockId]:
    def is_reachable(number: int | None) -> bool:
        return number is None or (number in cached and is_reachable(PARENTS[number]))

    return {h(number): BlockId(block_id) for number, block_id in cached.items() if is_reachable(number)}


@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60))
def test_others_know_exactly_the_blocks_whose_chain_is_whole(steps: list[tuple[int, bool]]):
    prefixes, cached, others = ClosedPrefixes(), {}, {}
    for at, (number, is_taken) in enumerate(steps):
        if number in cached:
            prefixes.apply([event(CacheChange.REMOVED, number, cached.pop(number))])
        else:
            cached[number] = at
            prefixes.apply([event(CacheChange.STORED, number, at)])
        if is_taken:
            told = prefixes.take()
            assert not told.stored.keys() & set(told.removed)
            assert set(told.removed) <= others.keys()
            others = {key: value for key, value in others.items() if key not in told.removed} | dict(told.stored)
            assert others == prefixes.told() == closed(cached)
            assert len(prefixes) == len(others)


@given(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_a_restart_tells_the_difference(before: set[int], after: set[int]):
    prefixes = ClosedPrefixes()
    prefixes.apply([event(CacheChange.STORED, number, number) for number in before])
    others = dict(prefixes.take().stored)
    prefixes.restart({h(number): CacheEntry(BlockId(number + 10), parent(number), None) for number in after})
    told = prefixes.take()
    others = {key: value for key, value in others.items() if key not in told.removed} | dict(told.stored)
    assert others == closed({number: number + 10 for number in after})

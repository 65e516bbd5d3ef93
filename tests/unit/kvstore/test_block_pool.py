"""The block pool, state by state. The sequences of operations are in test_pool_machine."""

from collections.abc import Callable

import pytest

from common.ids import BlockHash, BlockId
from common.messages import BlockCounts
from kvstore.block_pool import BlockPool, CacheEntry, IntegrityError, OutOfBlocks
from kvstore.cache_log import CacheChange


def h(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def cached_chain(pool: BlockPool, *numbers: int) -> list[BlockId]:
    """Allocate, publish and release one sequence with these hashes; its blocks stay as cache."""
    block_ids = pool.allocate(len(numbers))
    for block_id, number in zip(block_ids, numbers, strict=True):
        pool.publish(block_id, h(number))
    pool.release(block_ids)
    return block_ids


def test_a_new_pool_is_all_free():
    pool = BlockPool(4, 16)
    assert pool.counts() == BlockCounts(total=4, free=4, cached=0, held=0, quarantined=0)
    pool.check_integrity([])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0)])
def test_a_pool_without_blocks_or_slots_is_refused(num_blocks: int, block_size: int):
    with pytest.raises(ValueError, match="blocks"):
        BlockPool(num_blocks, block_size)


def test_allocate_takes_all_or_nothing():
    pool = BlockPool(4, 16)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 KV blocks are needed and 1 are available"):
        pool.allocate(2)
    assert pool.num_available == 1
    pool.check_integrity([held])
    assert pool.allocate(0) == []
    with pytest.raises(ValueError, match="cannot allocate"):
        pool.allocate(-1)


def test_the_next_free_blocks_are_those_that_allocate_takes():
    pool = BlockPool(4, 16)
    pool.release(pool.allocate(2)[:1])
    expected = pool.next_free(2)
    assert pool.next_free(0) == []
    assert len(pool.next_free(9)) == 3
    assert pool.allocate(2) == expected


def test_a_block_is_freed_by_its_last_holder():
    pool = BlockPool(2, 16)
    block_ids = pool.allocate(2)
    pool.share(block_ids)
    pool.release(block_ids)
    assert [pool.ref_count(block_id) for block_id in block_ids] == [1, 1]
    pool.release(block_ids)
    assert pool.counts().free == 2


def test_release_of_what_is_not_held_changes_nothing():
    pool = BlockPool(3, 16)
    first, second = pool.allocate(2)
    with pytest.raises(IntegrityError, match="block 2 is not held"):
        pool.release([first, BlockId(2)])
    with pytest.raises(IntegrityError, match="released 2 times"):
        pool.release([second, second])
    with pytest.raises(IntegrityError, match="block 9 is not held"):
        pool.release([BlockId(9)])
    pool.check_integrity([[first, second]])


def test_release_accepts_a_block_twice_when_it_is_held_twice():
    pool = BlockPool(2, 16)
    (block_id,) = pool.allocate(1)
    pool.share([block_id])
    pool.release([block_id, block_id])
    assert pool.counts().free == 2


def test_published_blocks_stay_as_cache_and_are_found_again():
    pool = BlockPool(4, 16)
    block_ids = cached_chain(pool, 1, 2, 3)
    assert pool.counts().cached == 3
    assert pool.match([h(1), h(2), h(9), h(3)]) == 2
    assert pool.counts().held == 0
    assert pool.pin_prefix([h(1), h(2), h(9), h(3)]) == block_ids[:2]
    assert pool.counts() == BlockCounts(total=4, free=1, cached=1, held=2, quarantined=0)
    pool.check_integrity([block_ids[:2]])


def test_the_match_stops_at_an_evicted_block_in_the_middle():
    pool = BlockPool(4, 16)
    block_ids = pool.allocate(4)
    for number, block_id in enumerate(block_ids):
        pool.publish(block_id, h(number))
    pool.release([block_ids[1]])
    assert pool.match([h(0), h(1), h(2), h(3)]) == 4
    assert pool.allocate(1) == [block_ids[1]]
    assert pool.match([h(0), h(1), h(2), h(3)]) == 1
    assert pool.pin_prefix([h(0), h(1), h(2)]) == [block_ids[0]]


def test_free_blocks_go_before_cached_ones():
    pool = BlockPool(4, 16)
    cached_chain(pool, 1, 2)
    pool.allocate(2)
    assert pool.num_evictions == 0
    assert pool.match([h(1), h(2)]) == 2


def test_eviction_takes_the_least_recently_used_and_tails_before_heads():
    pool = BlockPool(6, 16)
    old = cached_chain(pool, 1, 2, 3)
    new = cached_chain(pool, 11, 12, 13)
    pool.release(pool.pin_prefix([h(1)]))  # the head of the old one was just used
    order = [pool.allocate(1)[0] for _ in range(6)]
    assert order == [old[2], old[1], new[2], new[1], new[0], old[0]]
    assert pool.num_evictions == 6
    assert pool.match([h(1)]) == pool.match([h(11)]) == 0


def test_a_hash_that_is_there_keeps_its_first_block():
    pool = BlockPool(4, 16)
    first, second = pool.allocate(2)
    assert pool.publish(first, h(1))
    assert not pool.publish(second, h(1))
    assert pool.block_hash(second) is None
    pool.release([second])
    assert pool.counts().free == 3
    assert pool.pin_prefix([h(1)]) == [first]
    assert pool.publish(first, h(1))  # again is fine


def test_only_held_blocks_are_published_and_under_one_hash():
    pool = BlockPool(2, 16)
    with pytest.raises(IntegrityError, match="not held"):
        pool.publish(BlockId(0), h(1))
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, h(1))
    with pytest.raises(IntegrityError, match="another hash"):
        pool.publish(block_id, h(2))
    pool.check_integrity([[block_id]])


def test_withdraw_is_for_the_only_holder():
    pool = BlockPool(2, 16)
    (block_id,) = pool.allocate(1)
    pool.publish(block_id, h(1))
    pool.share([block_id])
    with pytest.raises(IntegrityError, match="2 holders"):
        pool.withdraw(block_id)
    pool.release([block_id])
    pool.withdraw(block_id)
    assert pool.match([h(1)]) == 0
    assert pool.publish(block_id, h(2))


def test_quarantined_blocks_are_neither_found_nor_handed_out():
    pool = BlockPool(2, 16)
    block_ids = pool.allocate(2)
    pool.publish(block_ids[0], h(1))
    pool.quarantine(block_ids)
    assert pool.counts() == BlockCounts(total=2, free=0, cached=0, held=0, quarantined=2)
    assert pool.match([h(1)]) == 0
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)
    pool.check_integrity([])
    pool.end_quarantine(block_ids)
    assert pool.counts().free == 2


def test_quarantine_is_refused_as_a_whole_when_a_block_is_shared():
    pool = BlockPool(2, 16)
    block_ids = pool.allocate(2)
    pool.share([block_ids[1]])
    with pytest.raises(IntegrityError, match="2 holders"):
        pool.quarantine(block_ids)
    assert pool.counts().quarantined == 0
    with pytest.raises(IntegrityError, match="named twice"):
        pool.quarantine([block_ids[0], block_ids[0]])


def test_end_of_quarantine_is_for_quarantined_blocks_once_each():
    pool = BlockPool(3, 16)
    block_ids = pool.allocate(3)
    pool.quarantine(block_ids[:2])
    with pytest.raises(IntegrityError, match="not quarantined"):
        pool.end_quarantine(block_ids)
    with pytest.raises(IntegrityError, match="once each"):
        pool.end_quarantine([block_ids[0], block_ids[0]])
    pool.end_quarantine(block_ids[:2])
    with pytest.raises(IntegrityError, match="not quarantined"):
        pool.end_quarantine(block_ids[:2])


def test_reset_forgets_held_and_cached_hashes():
    pool = BlockPool(4, 16)
    cached_chain(pool, 1, 2)
    held = pool.allocate(1)
    pool.publish(held[0], h(3))
    pool.reset_cache()
    assert pool.counts() == BlockCounts(total=4, free=3, cached=0, held=1, quarantined=0)
    assert pool.match([h(1)]) == pool.match([h(3)]) == 0
    assert pool.num_evictions == 0
    pool.check_integrity([held])


def test_cache_events_tell_what_was_stored_and_removed_in_order():
    pool = BlockPool(2, 16)
    block_ids = cached_chain(pool, 1, 2)
    assert pool.cached_blocks() == {h(1): block_ids[0], h(2): block_ids[1]}
    pool.allocate(1)
    drained = pool.drain_cache_events()
    assert drained.complete
    assert [(event.change, event.block_hash, event.block_id) for event in drained.events] == [
        (CacheChange.STORED, h(1), block_ids[0]),
        (CacheChange.STORED, h(2), block_ids[1]),
        (CacheChange.REMOVED, h(2), block_ids[1]),
    ]
    assert pool.drain_cache_events().events == ()


def test_integrity_names_a_missing_holder():
    pool = BlockPool(3, 16)
    block_ids = pool.allocate(2)
    with pytest.raises(IntegrityError, match=f"block {block_ids[1]} has 1 references and 0 holders"):
        pool.check_integrity([block_ids[:1]])


def test_integrity_names_a_holder_too_many():
    pool = BlockPool(3, 16)
    block_ids = pool.allocate(1)
    with pytest.raises(IntegrityError, match=f"block {block_ids[0]} has 1 references and 2 holders"):
        pool.check_integrity([block_ids, block_ids])
    with pytest.raises(IntegrityError, match="do not exist"):
        pool.check_integrity([block_ids, [BlockId(7)]])


def test_integrity_reports_at_most_ten_faults():
    pool = BlockPool(100, 16)
    pool.allocate(100)
    with pytest.raises(IntegrityError, match="and 90 more") as caught:
        pool.check_integrity([])
    assert str(caught.value).count("references") == 10


@pytest.mark.parametrize(
    ("break_books", "complaint"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "2 states at once"),
        (lambda pool: pool._free.pop(), "idle in 0 lists"),
        (lambda pool: pool._free.append(BlockId(99)), "do not exist"),
        (lambda pool: pool._quarantined.add(pool._free.pop()) or pool._hash_of.__setitem__(3, h(9)), "carry a hash"),
        (lambda pool: pool._entries.__setitem__(h(1), CacheEntry(BlockId(2), None, None)), "does not carry it"),
        (lambda pool: pool._evictable.add(pool._free.pop(), None), "cached without a hash"),
        (lambda pool: pool._hash_of.__setitem__(3, h(9)), "carries a hash"),
    ],
)
def test_integrity_sees_books_that_were_broken_from_outside(break_books: Callable[[BlockPool], object], complaint: str):
    pool = BlockPool(4, 16)
    cached_chain(pool, 1)
    break_books(pool)
    with pytest.raises(IntegrityError, match=complaint):
        pool.check_integrity([])

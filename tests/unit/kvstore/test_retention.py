"""Which cached block goes first."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.ids import BlockHash, BlockId
from kvstore.block_pool import BlockPool, OutOfBlocks
from kvstore.retention import LeastRecentlyUsed, Tenant

A, B = Tenant(BlockHash(b"a")), Tenant(BlockHash(b"b"))


def add(policy: LeastRecentlyUsed, tenant: Tenant, *block_ids: int) -> None:
    for block_id in block_ids:
        policy.add(BlockId(block_id), tenant)


def victims(policy: LeastRecentlyUsed) -> list[int]:
    return [policy.pop_victim() for _ in range(len(policy))]


def test_without_a_cap_the_oldest_goes_first_whoever_owns_it():
    policy = LeastRecentlyUsed()
    add(policy, A, 1, 2)
    add(policy, B, 3)
    add(policy, A, 4)
    policy.remove(BlockId(2))
    add(policy, A, 2)
    assert victims(policy) == [1, 3, 4, 2]


def test_a_tenant_over_its_cap_pays_until_it_is_at_its_cap():
    policy = LeastRecentlyUsed(max_tenant_blocks=2)
    add(policy, B, 1, 2)
    add(policy, A, 3, 4, 5, 6)
    assert victims(policy) == [3, 4, 1, 2, 5, 6]


def test_a_flood_of_one_tenant_leaves_the_others_cache():
    pool = BlockPool(12, 16, LeastRecentlyUsed(max_tenant_blocks=4))
    store(pool, B, 4, first=100)
    for round_number in range(10):
        store(pool, A, 4, first=4 * round_number)
    assert pool.match([key(number) for number in range(100, 104)]) == 4


def test_room_that_nobody_else_wants_is_used_beyond_the_cap():
    pool = BlockPool(8, 16, LeastRecentlyUsed(max_tenant_blocks=2))
    store(pool, A, 8, first=0)
    assert pool.counts().cached == 8


def test_kept_blocks_are_never_evicted_and_not_offered():
    pool = BlockPool(8, 16)
    store(pool, A, 2, first=0)
    pool.keep([key(0), key(1), key(2)])
    assert pool.num_available == 6
    for round_number in range(1, 5):
        store(pool, A, 6, first=10 * round_number)
    assert pool.match([key(0), key(1)]) == 2
    held = pool.pin_prefix([key(0), key(1)])
    pool.check_integrity([held])
    pool.release(held)
    pool.keep([])
    assert pool.num_available == 8
    pool.allocate(8)


def test_no_more_than_half_of_a_pool_can_be_kept():
    pool = BlockPool(4, 16)
    with pytest.raises(OutOfBlocks, match="half of 4"):
        pool.keep([key(1), key(2), key(3)])


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 11)), max_size=60), st.integers(0, 4))
def test_books_balance_whatever_is_done(steps: list[tuple[int, int]], cap: int):
    policy, model = LeastRecentlyUsed(cap), {}
    for action, number in steps:
        block_id = BlockId(number)
        if block_id in policy:
            if action == 0:
                over = {t for t, n in Counter(model.values()).items() if n > cap}
                victim = policy.pop_victim()
                assert not over or model[victim] in over
                del model[victim]
            else:
                policy.remove(block_id)
                del model[block_id]
        else:
            model[block_id] = (A, B)[action % 2]
            policy.add(block_id, model[block_id])
        assert len(policy) == len(model)
        assert set(policy) == set(model)


def key(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "little"))


def store(pool: BlockPool, tenant: Tenant, num_blocks: int, *, first: int) -> None:
    block_ids = pool.allocate(num_blocks)
    for offset, block_id in enumerate(block_ids):
        pool.publish(block_id, key(first + offset), tenant=tenant)
    pool.release(block_ids)
    pool.check_integrity([])

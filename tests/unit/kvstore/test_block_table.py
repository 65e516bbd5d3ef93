"""Block tables over a real pool."""

import pytest

from common.ids import BlockHash
from kvstore.block_pool import BlockPool, IntegrityError, OutOfBlocks
from kvstore.block_table import BlockCopy, BlockTable
from kvstore.prefix_hash import PrefixHasher, chain_hashes

BLOCK = 4
ROOT = BlockHash(b"r" * 16)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(10, BLOCK)


def new_table(pool: BlockPool) -> BlockTable:
    return BlockTable(pool, PrefixHasher(ROOT, pool.block_size))


def computed(pool: BlockPool, token_ids: list[int]) -> BlockTable:
    """Return the table of a sequence whose tokens were all computed, with whatever prefix was cached."""
    table = new_table(pool)
    table.adopt_prefix(token_ids)
    table.grow(len(token_ids))
    table.publish(token_ids, len(token_ids))
    return table


def test_sizes_of_pool_and_hasher_must_agree(pool: BlockPool):
    with pytest.raises(ValueError, match="hold 4 tokens, the hasher's 8"):
        BlockTable(pool, PrefixHasher(ROOT, 8))


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_table_takes_exactly_the_blocks_that_its_tokens_cover(pool: BlockPool, num_tokens: int, num_blocks: int):
    table = new_table(pool)
    assert table.blocks_needed(num_tokens) == num_blocks
    table.grow(num_tokens)
    assert len(table.block_ids) == num_blocks == pool.counts().held
    assert table.num_slots - num_tokens < BLOCK
    assert table.blocks_needed(num_tokens) == 0


def test_growing_allocates_only_what_crosses_a_boundary(pool: BlockPool):
    table = new_table(pool)
    for num_tokens in range(1, 10):
        table.grow(num_tokens)
        assert len(table.block_ids) == -(-num_tokens // BLOCK)
    table.grow(2)  # less than it has
    assert len(table.block_ids) == 3


def test_growth_that_does_not_fit_changes_nothing(pool: BlockPool):
    table = new_table(pool)
    table.grow(9)
    with pytest.raises(OutOfBlocks):
        table.grow(BLOCK * 11)
    assert len(table.block_ids) == 3
    pool.check_integrity([table.block_ids])


@pytest.mark.parametrize(
    ("num_tokens", "num_adopted"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)]
)
def test_the_last_token_is_always_left_to_compute(pool: BlockPool, num_tokens: int, num_adopted: int):
    token_ids = list(range(13))
    computed(pool, token_ids).release()
    table = new_table(pool)
    assert table.cached_prefix(token_ids[:num_tokens]) == num_adopted
    assert pool.counts().held == 0
    assert table.adopt_prefix(token_ids[:num_tokens]) == num_adopted
    assert table.num_slots == num_adopted
    pool.check_integrity([table.block_ids])


def test_a_prefix_is_adopted_as_far_as_the_tokens_agree(pool: BlockPool):
    first = computed(pool, list(range(12)))
    second = new_table(pool)
    assert second.adopt_prefix([*range(6), 99, 98, *range(8, 14)]) == 4
    assert list(second.block_ids) == list(first.block_ids)[:1]
    assert pool.ref_count(first.block_ids[0]) == 2


def test_only_an_empty_table_adopts(pool: BlockPool):
    table = new_table(pool)
    table.grow(1)
    with pytest.raises(IntegrityError, match="empty table"):
        table.adopt_prefix([1, 2])


def test_hashes_are_published_only_for_computed_full_blocks(pool: BlockPool):
    token_ids = list(range(11))
    hashes = chain_hashes(ROOT, token_ids, BLOCK)
    table = new_table(pool)
    table.grow(11)
    for num_computed, num_found in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (11, 2)]:
        table.publish(token_ids, num_computed)
        assert pool.match(hashes) == num_found
    assert list(table.block_hashes(token_ids)) == hashes


def test_more_than_was_stored_cannot_be_published(pool: BlockPool):
    table = new_table(pool)
    table.grow(4)
    with pytest.raises(IntegrityError, match="5 tokens cannot be computed"):
        table.publish(list(range(5)), 5)
    with pytest.raises(IntegrityError, match="cannot be computed"):
        table.publish([1, 2], 4)


def test_sixteen_equal_prompts_at_once_on_a_cold_cache_leave_one_copy(pool: BlockPool):
    pool = BlockPool(32, BLOCK)
    token_ids = list(range(8))
    tables = [new_table(pool) for _ in range(16)]
    for table in tables:
        assert table.adopt_prefix(token_ids) == 0
        table.grow(8)
    for table in tables:
        table.publish(token_ids, 8)
    pool.check_integrity([table.block_ids for table in tables])
    for table in tables:
        table.release()
    assert pool.counts().cached == 2
    assert pool.counts().free == 30
    pool.check_integrity([])


def test_a_fork_shares_every_block_the_partly_filled_too(pool: BlockPool):
    table = computed(pool, list(range(6)))
    twin = table.fork()
    assert list(twin.block_ids) == list(table.block_ids)
    assert pool.counts().held == 2
    pool.check_integrity([table.block_ids, twin.block_ids])
    table.release()
    assert list(twin.block_ids)
    twin.release()
    assert pool.counts().held == 0


def test_a_writer_to_a_shared_block_copies_it_first(pool: BlockPool):
    table = computed(pool, list(range(6)))
    twin = table.fork()
    shared = table.block_ids[1]
    copy = twin.copy_on_write(6)
    assert copy == BlockCopy(src=shared, dst=twin.block_ids[1])
    assert copy.src != copy.dst
    assert table.block_ids[1] == shared
    assert table.copy_on_write(6) is None  # its own again
    assert twin.block_ids[0] == table.block_ids[0]
    pool.check_integrity([table.block_ids, twin.block_ids])


def test_copy_on_write_without_room_changes_nothing():
    pool = BlockPool(2, BLOCK)
    table = computed(pool, list(range(6)))
    twin = table.fork()
    with pytest.raises(OutOfBlocks):
        twin.copy_on_write(6)
    assert list(twin.block_ids) == list(table.block_ids)
    pool.check_integrity([table.block_ids, twin.block_ids])


def test_other_tokens_after_a_truncation_never_keep_the_old_hash(pool: BlockPool):
    old = list(range(8))
    table = computed(pool, old)
    table.truncate(6)
    assert table.copy_on_write(6) is None
    assert pool.match(chain_hashes(ROOT, old, BLOCK)) == 1
    new = [*range(6), 96, 97]
    table.publish(new, 8)
    assert pool.match(chain_hashes(ROOT, new, BLOCK)) == 2


def test_a_truncated_fork_leaves_the_others_block_alone(pool: BlockPool):
    old = list(range(8))
    table = computed(pool, old)
    twin = table.fork()
    twin.truncate(6)
    assert twin.copy_on_write(6) is not None
    new = [*range(6), 96, 97]
    twin.publish(new, 8)
    assert pool.match(chain_hashes(ROOT, old, BLOCK)) == 2
    assert pool.match(chain_hashes(ROOT, new, BLOCK)) == 2
    pool.check_integrity([table.block_ids, twin.block_ids])


def test_blocks_after_a_truncation_are_published_anew(pool: BlockPool):
    table = computed(pool, list(range(12)))
    table.truncate(4)
    new = [*range(4), *range(50, 58)]
    table.grow(12)
    table.publish(new, 12)
    assert pool.match(chain_hashes(ROOT, new, BLOCK)) == 3


def test_a_published_block_that_is_written_again_is_published_again(pool: BlockPool):
    token_ids = list(range(8))
    table = computed(pool, token_ids)
    assert table.copy_on_write(5) is None
    assert pool.match(chain_hashes(ROOT, token_ids, BLOCK)) == 1
    table.publish(token_ids, 8)
    assert pool.match(chain_hashes(ROOT, token_ids, BLOCK)) == 2


def test_forks_that_part_ways_have_hashes_of_their_own(pool: BlockPool):
    table = computed(pool, list(range(6)))
    twin = table.fork()
    endings = {table: [*range(6), 60, 61], twin: [*range(6), 70, 71]}
    for each, token_ids in endings.items():
        each.copy_on_write(6)
        each.publish(token_ids, 8)
    for each, token_ids in endings.items():
        hashes = chain_hashes(ROOT, token_ids, BLOCK)
        assert [pool.block_hash(block_id) for block_id in each.block_ids] == hashes


@pytest.mark.parametrize(("num_tokens", "num_kept"), [(0, 0), (1, 1), (4, 1), (5, 2), (9, 3), (50, 3)])
def test_truncation_releases_the_blocks_past_the_end(pool: BlockPool, num_tokens: int, num_kept: int):
    table = computed(pool, list(range(9)))
    table.truncate(num_tokens)
    assert len(table.block_ids) == num_kept == pool.counts().held
    pool.check_integrity([table.block_ids])


def test_release_can_be_repeated(pool: BlockPool):
    table = computed(pool, list(range(9)))
    table.release()
    table.release()
    assert pool.counts().cached == 2
    assert pool.counts().free == 8
    assert table.adopt_prefix(list(range(9))) == 8  # and the table can be used again


def test_quarantine_sets_aside_only_what_a_writer_may_still_fill(pool: BlockPool):
    token_ids = list(range(14))
    other = computed(pool, token_ids[:8])
    table = new_table(pool)
    table.adopt_prefix(token_ids)
    table.grow(14)
    table.publish(token_ids, 12)  # one more block was received and checked
    at_risk = list(table.block_ids)[3:]
    assert table.quarantine() == at_risk
    assert list(table.block_ids) == []
    counts = pool.counts()
    assert (counts.held, counts.cached, counts.quarantined) == (2, 1, 1)
    pool.end_quarantine(at_risk)
    pool.check_integrity([other.block_ids])

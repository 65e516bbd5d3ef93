"""Random lives of sequences over one pool, against a model of what every slot holds.

A slot's content stands for all tokens up to its own, as real KV depends on them. So a wrong share, a missing copy, an
eviction of a held block or a hash on the wrong block shows as a sequence that reads something it did not write.
"""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.ids import BlockHash, BlockId
from kvstore.block_pool import BlockPool, OutOfBlocks
from kvstore.block_table import BlockTable
from kvstore.prefix_hash import PrefixHasher, chain_hashes

BLOCK = 2
NUM_BLOCKS = 12
ROOT = BlockHash(b"r" * 16)

Content = tuple[int, ...]
GARBAGE: Content = (-1,)

few_tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
picks = st.integers(0, 1000)


class Life:
    """One sequence: its tokens, its table, and how many tokens are computed."""

    def __init__(self, token_ids: list[int], table: BlockTable, num_computed: int) -> None:
        self.token_ids = token_ids
        self.table = table
        self.num_computed = num_computed


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.slots: list[list[Content]] = [[GARBAGE] * BLOCK for _ in range(NUM_BLOCKS)]
        self.lives: list[Life] = []
        self.leases: list[list[BlockId]] = []
        self.quarantined: list[list[BlockId]] = []
        self.tokens_of: dict[BlockHash, Content] = {}

    # ---- what sequences do ----

    @rule(token_ids=few_tokens)
    def arrive(self, token_ids: list[int]) -> None:
        table = BlockTable(self.pool, PrefixHasher(ROOT, BLOCK))
        for index, block_hash in enumerate(chain_hashes(ROOT, token_ids, BLOCK)):
            self.tokens_of[block_hash] = tuple(token_ids[: (index + 1) * BLOCK])
        expected = table.cached_prefix(token_ids)
        num_adopted = table.adopt_prefix(token_ids)
        assert num_adopted == expected < len(token_ids)
        life = Life(token_ids.copy(), table, num_adopted)
        if self.grow(life):
            self.lives.append(life)
        else:
            table.release()

    @rule(pick=picks, num_tokens=st.integers(1, 6))
    def compute(self, pick: int, num_tokens: int) -> None:
        life = self.choose(pick)
        if life is None or not self.grow(life):
            return
        past = min(life.num_computed + num_tokens, len(life.token_ids))
        for position in range(life.num_computed, past):
            if not self.own(life, position):
                past = position
                break
            block_id = life.table.block_ids[position // BLOCK]
            self.slots[block_id][position % BLOCK] = tuple(life.token_ids[: position + 1])
        life.num_computed = past
        for index, block_hash in enumerate(chain_hashes(ROOT, life.token_ids, BLOCK)):
            self.tokens_of[block_hash] = tuple(life.token_ids[: (index + 1) * BLOCK])
        life.table.publish(life.token_ids, past)

    @rule(pick=picks, token_id=st.integers(0, 1))
    def append(self, pick: int, token_id: int) -> None:
        life = self.choose(pick)
        if life is not None and len(life.token_ids) < 16:
            life.token_ids.append(token_id)

    @rule(pick=picks)
    def fork(self, pick: int) -> None:
        life = self.choose(pick)
        if life is not None and len(self.lives) < 8:
            self.lives.append(Life(life.token_ids.copy(), life.table.fork(), life.num_computed))

    @rule(pick=picks, num_tokens=st.integers(0, 12))
    def truncate(self, pick: int, num_tokens: int) -> None:
        life = self.choose(pick)
        if life is None:
            return
        kept = min(num_tokens, len(life.token_ids))
        life.table.truncate(kept)
        life.token_ids = life.token_ids[:kept]
        life.num_computed = min(life.num_computed, kept)

    @rule(pick=picks)
    def leave(self, pick: int) -> None:
        life = self.choose(pick)
        if life is not None:
            self.lives.remove(life)
            life.table.release()
            life.table.release()

    @rule(pick=picks)
    def preempt(self, pick: int) -> None:
        life = self.choose(pick)
        if life is not None:
            life.table.release()
            life.num_computed = life.table.adopt_prefix(life.token_ids) if life.token_ids else 0

    # ---- what transfers do ----

    @rule(pick=picks)
    def lend(self, pick: int) -> None:
        life = self.choose(pick)
        if life is not None:
            block_ids = list(life.table.block_ids)
            self.pool.share(block_ids)
            self.leases.append(block_ids)

    @rule()
    def end_lease(self) -> None:
        if self.leases:
            self.pool.release(self.leases.pop(0))

    @rule(pick=picks)
    def abandon_to_a_writer(self, pick: int) -> None:
        life = self.choose(pick)
        if life is not None:
            self.lives.remove(life)
            at_risk = life.table.quarantine()
            for block_id in at_risk:  # the late writer
                self.slots[block_id] = [GARBAGE] * BLOCK
            self.quarantined.append(at_risk)

    @rule()
    def writer_stopped(self) -> None:
        if self.quarantined:
            self.pool.end_quarantine(self.quarantined.pop())

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()

    # ---- what must hold ----

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity([*(life.table.block_ids for life in self.lives), *self.leases])
        counts = self.pool.counts()
        assert counts.free + counts.cached + counts.held + counts.quarantined == counts.total
        assert counts.quarantined == sum(map(len, self.quarantined))

    @invariant()
    def sequences_read_what_they_wrote(self) -> None:
        for life in self.lives:
            for position in range(life.num_computed):
                block_id = life.table.block_ids[position // BLOCK]
                assert self.slots[block_id][position % BLOCK] == tuple(life.token_ids[: position + 1])

    @invariant()
    def a_hash_leads_to_its_tokens(self) -> None:
        for block_hash, block_id in self.pool.cached_blocks().items():
            prefix = self.tokens_of[block_hash]
            expected = [prefix[: len(prefix) - BLOCK + 1 + offset] for offset in range(BLOCK)]
            assert self.slots[block_id] == expected

    @invariant()
    def waste_is_less_than_a_block_a_sequence(self) -> None:
        for life in self.lives:
            assert life.table.num_slots - len(life.token_ids) < BLOCK

    def teardown(self) -> None:
        for life in self.lives:
            life.table.release()
        for block_ids in self.leases:
            self.pool.release(block_ids)
        for block_ids in self.quarantined:
            self.pool.end_quarantine(block_ids)
        self.pool.check_integrity([])
        assert self.pool.num_available == NUM_BLOCKS

    # ---- helpers ----

    def choose(self, pick: int) -> Life | None:
        return self.lives[pick % len(self.lives)] if self.lives else None

    def grow(self, life: Life) -> bool:
        before = len(life.table.block_ids)
        try:
            life.table.grow(len(life.token_ids))
        except OutOfBlocks:
            assert life.table.blocks_needed(len(life.token_ids)) > self.pool.num_available
            return False
        for block_id in list(life.table.block_ids)[before:]:
            self.slots[block_id] = [GARBAGE] * BLOCK
        return True

    def own(self, life: Life, position: int) -> bool:
        """Make the block of ``position`` the sequence's own; say whether there was room for a copy."""
        try:
            copy = life.table.copy_on_write(position)
        except OutOfBlocks:
            return False
        if copy is not None:
            self.slots[copy.dst] = self.slots[copy.src].copy()
        return True


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

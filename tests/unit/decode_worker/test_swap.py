"""Host memory for preempted sequences: bytes come back as they were, the limit holds, measured rates decide."""

import random

import pytest
import torch

from common.model.spec import LayerSpec
from decode_worker.step import Restore
from decode_worker.swap import PreemptionMode, SwapSpace
from kvstore.block_pool import BlockPool
from kvstore.layout import KvLayout
from kvstore.sequence import Sequence
from kvstore.storage import KvStorage
from tests.support.sequences import new_sequence, unique_tokens

BLOCK, NUM_BLOCKS = 4, 16
LAYOUT = KvLayout((LayerSpec(2, 8, 8),) * 3, BLOCK, torch.float32)
AMPLE = NUM_BLOCKS * LAYOUT.block_bytes


class Bench:
    """A pool with its bytes, and a swap space over it."""

    def __init__(self, mode: PreemptionMode = "auto", limit_bytes: int = AMPLE, compute_rate: float = 0.0) -> None:
        self.pool = BlockPool(NUM_BLOCKS, BLOCK)
        self.storage = KvStorage(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
        self.space = SwapSpace(self.storage, mode, limit_bytes, lambda: compute_rate)

    def sequence(self, num_tokens: int, seed: int = 0) -> Sequence:
        """Return a sequence of which all but the last token are computed, its blocks filled at random."""
        sequence = new_sequence(self.pool, unique_tokens(num_tokens, seed))
        sequence.table.grow(num_tokens)
        sequence.num_computed_tokens = num_tokens - 1
        block_ids = sequence.table.block_ids
        payload = random.Random(seed).randbytes(len(block_ids) * LAYOUT.block_bytes)
        self.storage.write(block_ids, memoryview(payload))
        return sequence


@pytest.mark.parametrize(("num_tokens", "first_block"), [(2, 0), (5, 0), (18, 0), (18, 2), (17, 4)])
def test_bytes_come_back_into_other_blocks(num_tokens: int, first_block: int):
    bench = Bench()
    sequence = bench.sequence(num_tokens)
    num_blocks = -(-(num_tokens - 1) // BLOCK)
    before = [bench.storage.read([block_id]) for block_id in sequence.table.block_ids[:num_blocks]]
    bench.space.saving(sequence)()
    sequence.table.release()
    other = bench.sequence(num_tokens, seed=9)
    sequence.table.grow(num_tokens)
    bench.space.restoring([Restore(sequence, first_block)])()
    after = [bench.storage.read([block_id]) for block_id in sequence.table.block_ids[:num_blocks]]
    assert after[first_block:] == before[first_block:]
    assert other.table.block_ids != sequence.table.block_ids
    assert bench.space.counters() == {
        "preemptions_swapped": 1,
        "swapped_out_blocks": num_blocks,
        "swapped_in_blocks": num_blocks - first_block,
    }


def test_the_limit_holds_and_what_is_dropped_or_restored_makes_room():
    bench = Bench(limit_bytes=3 * LAYOUT.block_bytes)
    small, large = bench.sequence(9), bench.sequence(17)
    assert not bench.space.is_preferred(large)
    for end in (bench.space.drop, lambda one: bench.space.restoring([Restore(one, 0)])()):
        assert bench.space.is_preferred(small)
        bench.space.saving(small)()
        assert not bench.space.is_preferred(small)
        end(small)
    assert bench.space.is_preferred(small)
    bench.space.drop(large)


@pytest.mark.parametrize(
    ("mode", "compute_rate", "expected"),
    [
        ("recompute", 1e-9, False),
        ("swap", 1e12, True),
        ("auto", 1e-9, True),
        ("auto", 1e12, False),
        ("auto", 0.0, True),
    ],
)
def test_what_is_sooner_by_measured_rates_is_chosen(mode: PreemptionMode, compute_rate: float, expected: bool):
    bench = Bench(mode, compute_rate=compute_rate)
    sequence = bench.sequence(17)
    bench.space.saving(sequence)()
    bench.space.drop(sequence)
    assert bench.space.is_preferred(sequence) is expected


def test_what_is_not_measured_is_tried():
    bench = Bench(compute_rate=1e12)
    assert bench.space.is_preferred(bench.sequence(17))

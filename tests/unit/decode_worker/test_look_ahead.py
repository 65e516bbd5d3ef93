"""The step behind the running one: when it is sure, what it takes, and that nothing comes of a token too many."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import BeamParams, SamplingParams
from decode_worker.scheduler import DecodeScheduler
from kvstore.block_pool import BlockPool
from kvstore.sequence import Chunk, Sequence
from tests.support.sequences import new_sequence, unique_tokens

BLOCK = 4


class Bench:
    """A scheduler, a clock, and a model that says token 7 until a sequence has its ``length``, and then 0, the end."""

    def __init__(self, num_blocks: int = 64, max_num_seqs: int = 8) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = DecodeScheduler(self.pool, max_num_seqs=max_num_seqs, token_budget=32, local_chunk_tokens=8)
        self.now = 0.0
        self.lengths: dict[Sequence, int] = {}
        self.leaving: list[Sequence] = []

    def add(self, length: int, output_length: int = 100, *, max_tokens: int = 100, priority: int = 0) -> Sequence:
        tokens = unique_tokens(length, len(self.lengths))
        sequence = new_sequence(self.pool, tokens, max_tokens, priority=priority)
        self.lengths[sequence] = output_length
        self.scheduler.add(sequence)
        self.scheduler.compute_here(sequence)
        return sequence

    def schedule(self) -> tuple[Chunk, ...]:
        self.now += 0.01
        return self.scheduler.schedule(self.now).chunks

    def behind(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        return self.scheduler.schedule_behind(chunks, self.now)

    def land(self, chunks: tuple[Chunk, ...], behind: tuple[Chunk, ...] = ()) -> None:
        """Take the results of ``chunks`` while ``behind`` is in the air."""
        for chunk in chunks:
            if self.scheduler.stage(chunk.sequence).name == "RUNNING":
                self._take(chunk)
        in_air = {chunk.sequence for chunk in behind}
        for sequence in [sequence for sequence in self.leaving if sequence not in in_air]:
            self.leaving.remove(sequence)
            sequence.table.release()

    def _take(self, chunk: Chunk) -> None:
        sequence, samples = chunk.sequence, chunk.samples
        self.scheduler.computed(chunk)
        if not samples:
            return
        sequence.token_ids.append(7 if sequence.num_output_tokens + 1 < self.lengths[sequence] else 0)
        if sequence.token_ids[-1] == 0 or sequence.num_output_tokens == sequence.sampling.max_tokens:
            self.scheduler.retire(sequence)
            self.leaving.append(sequence)


def sequences(chunks: tuple[Chunk, ...]) -> list[Sequence]:
    return [chunk.sequence for chunk in chunks]


def test_all_that_decode_go_on_with_a_block_for_the_unknown_token():
    bench = Bench()
    first, second = bench.add(BLOCK - 1), bench.add(BLOCK)
    chunks = bench.schedule()
    behind = bench.behind(chunks)
    assert sequences(behind) == [first, second]
    assert [len(sequence.table.block_ids) for sequence in (first, second)] == [1, 2]
    bench.land(chunks, behind)
    assert [(chunk.num_scheduled_tokens, chunk.samples) for chunk in behind] == [(1, True), (1, True)]


def test_one_that_ends_surely_is_left_out_and_nothing_follows_the_last():
    bench = Bench()
    ends, goes_on = bench.add(3, max_tokens=1), bench.add(3, max_tokens=2)
    chunks = bench.schedule()
    behind = bench.behind(chunks)
    assert sequences(chunks) == [ends, goes_on]
    assert sequences(behind) == [goes_on]
    bench.land(chunks, behind)
    assert bench.behind(behind) == ()


def test_a_token_too_many_is_dropped_and_its_blocks_go_back_when_its_step_has_ended():
    bench = Bench()
    sequence = bench.add(BLOCK, output_length=1)
    chunks = bench.schedule()
    behind = bench.behind(chunks)
    bench.land(chunks, behind)
    assert sequence.token_ids[-1] == 0
    assert bench.pool.counts().held == 2
    assert bench.behind(behind) == ()
    bench.land(behind)
    assert sequence.num_output_tokens == 1
    assert bench.pool.counts().held == 0


def test_a_prompt_that_is_not_read_to_its_end_waits_for_its_results():
    bench = Bench()
    bench.add(40)
    assert bench.behind(bench.schedule()) == ()


def test_who_could_come_in_is_decided_with_the_results():
    bench = Bench(max_num_seqs=2)
    bench.add(3)
    chunks = bench.schedule()
    second = bench.add(3)
    assert bench.behind(chunks) == ()  # there is a seat for it
    bench.land(chunks)
    chunks = bench.schedule()
    bench.add(3)
    assert second in sequences(bench.behind(chunks))  # all seats are taken
    bench.add(3, priority=-5)
    assert bench.behind(chunks) == ()  # it may displace one


def test_nothing_is_taken_when_not_all_can_have_a_block():
    bench = Bench(num_blocks=3)
    bench.add(BLOCK)
    bench.add(BLOCK)
    chunks = bench.schedule()
    assert len(chunks) == 2
    assert bench.behind(chunks) == ()
    assert bench.pool.counts().held == 2


@dataclass(frozen=True)
class Odd:
    """A change that makes a sequence's next step depend on more than its own token."""

    name: str

    def make(self, sequence: Sequence) -> None:
        match self.name:
            case "beams":
                sequence.sampling = SamplingParams(100, beam=BeamParams(2))
            case "forks":
                sequence.num_forks = 2
            case "samples":
                sequence.sample_indices = (0, 1)


@pytest.mark.parametrize("odd", [Odd("beams"), Odd("forks"), Odd("samples")], ids=lambda odd: odd.name)
def test_searches_and_prompts_of_several_samples_wait_for_their_results(odd: Odd):
    bench = Bench()
    bench.add(3)
    odd.make(bench.add(3))
    assert bench.behind(bench.schedule()) == ()


def test_a_block_that_others_hold_is_copied_first():
    bench = Bench()
    sequence = bench.add(3)
    twin = sequence.table.fork
    chunks = bench.schedule()
    other = twin()
    assert bench.behind(chunks) == ()
    other.release()
    assert sequences(bench.behind(chunks)) == [sequence]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(14, 40),
    st.integers(1, 4),
    st.lists(st.integers(0, 8), max_size=8),
)
def test_every_sequence_ends_as_without_it_and_nothing_is_held(
    shapes: list[tuple[int, int, int]], num_blocks: int, max_num_seqs: int, arrivals: list[int]
):
    bench = Bench(num_blocks, max_num_seqs)
    for (length, output_length, max_tokens), pause in zip(shapes, [*arrivals, *[0] * 8], strict=False):
        bench.add(length, output_length, max_tokens=max_tokens)
        for _ in range(pause):
            run(bench)
    for _ in range(400):
        run(bench)
    for sequence, (_, output_length, max_tokens) in zip(bench.lengths, shapes, strict=True):
        assert sequence.num_output_tokens == min(output_length, max_tokens)
    assert bench.pool.counts().held == 0
    bench.pool.check_integrity([])


def run(bench: Bench) -> None:
    """Run one decision and what can be launched behind it, as the step loop does."""
    chunks = bench.schedule()
    while chunks:
        behind = bench.behind(chunks)
        for chunk in behind:
            assert chunk.sequence.table.num_slots > chunk.sequence.num_tokens
        bench.land(chunks, behind)
        chunks = behind

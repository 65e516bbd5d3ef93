"""Who makes room for whom: urgency, ageing, and what happens to the one that is preempted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.scheduler import DecodeScheduler
from decode_worker.slots import Stage
from decode_worker.step import DecodeStep
from kvstore.block_pool import BlockPool
from kvstore.sequence import Chunk, Sequence
from tests.support.sequences import new_sequence, unique_tokens

BLOCK = 4
AGEING_S = 5.0


class Bench:
    """A scheduler, a clock, and a model that always says token 7. ``saves``: preempted sequences go to host memory."""

    def __init__(self, num_blocks: int, *, saves: bool = False, max_num_seqs: int = 8) -> None:
        self.pool = BlockPool(num_blocks, BLOCK)
        self.scheduler = DecodeScheduler(
            self.pool,
            max_num_seqs=max_num_seqs,
            token_budget=64,
            local_chunk_tokens=16,
            ageing_s=AGEING_S,
            saves=lambda _: saves,
        )
        self.now = 0.0
        self.preempted: list[Sequence] = []
        self.restored: list[Sequence] = []
        self.finished: list[Sequence] = []
        self._num_added = 0

    def add(self, length: int, max_tokens: int, priority: int = 0) -> Sequence:
        sequence = new_sequence(self.pool, unique_tokens(length, self._num_added), max_tokens, priority=priority)
        self._num_added += 1
        self.scheduler.add(sequence)
        self.scheduler.compute_here(sequence)
        return sequence

    def step(self, seconds: float = 0.01) -> DecodeStep:
        self.now += seconds
        step = self.scheduler.schedule(self.now)
        self.preempted += [slot.sequence for slot in step.preempted]
        self.restored += [restore.sequence for restore in step.restored]
        if step.saving is not None:
            assert step.chunks == ()
            self.scheduler.saved(step.saving.sequence)
        restored = {restore.sequence for restore in step.restored}
        assert restored <= {chunk.sequence for chunk in step.chunks if chunk.num_scheduled_tokens == 1}
        for chunk in step.chunks:
            self._compute(chunk)
        self.check()
        return step

    def _compute(self, chunk: Chunk) -> None:
        sequence, samples = chunk.sequence, chunk.samples
        self.scheduler.computed(chunk)
        if samples:
            sequence.token_ids.append(7)
            if sequence.num_output_tokens == sequence.sampling.max_tokens:
                self.finished.append(sequence)
                self.scheduler.retire(sequence)
                sequence.table.release()

    def run(self, sequence: Sequence, limit: int = 2_000) -> None:
        """Step until ``sequence`` has finished."""
        for _ in range(limit):
            if sequence in self.finished:
                return
            self.step()
        raise AssertionError(f"not finished after {limit} steps")

    def check(self) -> None:
        self.pool.check_integrity(sequence.table.block_ids for sequence in self.scheduler.sequences())


@pytest.mark.parametrize("saves", [False, True])
def test_the_least_urgent_makes_room_although_it_came_first(saves: bool):
    bench = Bench(8, saves=saves)
    batch, chat = bench.add(8, 20, priority=5), bench.add(8, 20, priority=0)
    bench.run(chat)
    assert set(bench.preempted) == {batch}
    bench.run(batch)
    assert bench.restored == (bench.preempted if saves else [])
    assert bench.pool.counts().held == 0


@pytest.mark.parametrize("saves", [False, True])
def test_an_urgent_newcomer_takes_the_place_of_one_that_runs(saves: bool):
    bench = Bench(7, saves=saves)
    batch = bench.add(12, 16, priority=5)
    bench.step()
    chat = bench.add(12, 4, priority=0)
    bench.run(chat)
    assert bench.preempted == [batch]
    assert not bench.finished.count(batch)
    bench.run(batch)


def test_a_seat_is_taken_from_the_less_urgent_and_from_nobody_else():
    bench = Bench(64, max_num_seqs=2)
    equal, batch = bench.add(4, 50), bench.add(4, 50, priority=1)
    bench.step()
    bench.run(bench.add(4, 2))
    assert bench.preempted == [batch]
    assert equal not in bench.finished


def test_equals_wait_for_each_other_however_long():
    bench = Bench(8, max_num_seqs=1)
    first, second = bench.add(4, 20), bench.add(4, 2)
    for _ in range(10):
        bench.step(seconds=10 * AGEING_S)
    assert bench.preempted == []
    bench.run(second)
    assert bench.finished == [first, second]


def test_nobody_is_preempted_when_that_would_not_make_enough_room():
    bench = Bench(8)
    kept, batch = bench.add(16, 4), bench.add(4, 30, priority=9)
    bench.step()
    urgent = bench.add(28, 2, priority=-1)
    bench.step()
    assert set(bench.preempted) <= {kept, batch}
    bench.run(urgent)
    other = Bench(8)
    other.add(20, 8)
    other.add(4, 8, priority=9)
    other.step()
    other.add(24, 2, priority=1)
    assert other.step().preempted == ()


def test_a_long_answer_is_deferred_by_chats_and_never_starved():
    bench = Bench(10, saves=True, max_num_seqs=2)
    long = bench.add(8, 24, priority=10)
    chats: list[Sequence] = []
    for _ in range(400):
        if len(chats) - sum(chat in bench.finished for chat in chats) < 3:
            chats.append(bench.add(8, 6, priority=0))
        bench.step(seconds=0.5)
        if long in bench.finished:
            break
    assert long in bench.finished
    assert long in bench.preempted
    assert bench.finished.index(long) > 10


def test_what_is_saved_counts_as_no_work_and_its_blocks_are_free():
    bench = Bench(8, saves=True, max_num_seqs=1)
    batch = bench.add(12, 16, priority=5)
    bench.step()
    bench.add(24, 4, priority=0)
    while not bench.preempted:
        bench.step()
    assert batch.table.block_ids == []
    assert bench.scheduler.stage(batch) is Stage.WAITING
    assert bench.scheduler.num_queued_tokens == sum(
        one.num_remaining_tokens for one in bench.scheduler.sequences() if one is not batch
    )


def test_one_that_leaves_while_it_is_saved_is_forgotten():
    bench = Bench(4, saves=True)
    first, second = bench.add(4, 12), bench.add(4, 12)
    while (step := bench.scheduler.schedule(0.0)).saving is None:
        for chunk in step.chunks:
            bench.scheduler.computed(chunk)
            chunk.sequence.token_ids.append(7)
    assert step.saving.sequence is second
    bench.scheduler.retire(second)
    second.table.release()
    bench.scheduler.saved(second)
    bench.check()
    bench.run(first)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_everybody_finishes_with_any_priorities_pauses_and_pool(data: st.DataObject):
    num_blocks = data.draw(st.integers(4, 16), label="num_blocks")
    bench = Bench(num_blocks, saves=data.draw(st.booleans()), max_num_seqs=data.draw(st.integers(1, 4)))
    everyone: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 30), label="num_operations")):
        if data.draw(st.booleans()):
            length = data.draw(st.integers(1, num_blocks * BLOCK - 1))
            room = num_blocks * BLOCK - length
            everyone.append(bench.add(length, data.draw(st.integers(1, room)), data.draw(st.integers(-3, 3))))
        else:
            bench.step(data.draw(st.sampled_from([0.01, 1.0, 30.0])))
    for _ in range(5_000):
        if len(bench.finished) == len(everyone):
            break
        bench.step(0.1)
    assert set(bench.finished) == set(everyone)
    assert bench.pool.counts().held == 0


@settings(max_examples=40, deadline=None)
@given(priority=st.integers(1, 20), length=st.integers(1, 20), saves=st.booleans())
def test_whatever_its_priority_it_is_served_after_as_many_ageing_times(priority: int, length: int, saves: bool):
    bench = Bench(12, saves=saves, max_num_seqs=2)
    patient = bench.add(length, 10, priority=priority)
    others: list[Sequence] = []
    num_steps = int((priority + 2) * AGEING_S / 0.5) + 200
    for _ in range(num_steps):
        while sum(other not in bench.finished for other in others) < 4:
            others.append(bench.add(10, 5))
        bench.step(seconds=0.5)
    assert patient in bench.finished

"""The prefill scheduler: packing, order, admission, shared prefixes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block_pool import BlockPool
from kvstore.sequence import Sequence
from prefill_worker.scheduler import MAX_BYPASS, PrefillScheduler
from tests.support.sequences import new_sequence, unique_tokens

BLOCK = 4


def make(num_blocks: int = 64, token_budget: int = 16, max_num_seqs: int = 8) -> tuple[BlockPool, PrefillScheduler]:
    pool = BlockPool(num_blocks, BLOCK)
    return pool, PrefillScheduler(pool, token_budget=token_budget, max_num_seqs=max_num_seqs)


def add(pool: BlockPool, scheduler: PrefillScheduler, *lengths: int) -> list[Sequence]:
    sequences = [new_sequence(pool, unique_tokens(length, start=index)) for index, length in enumerate(lengths)]
    for sequence in sequences:
        scheduler.add(sequence)
    return sequences


def run_step(scheduler: PrefillScheduler) -> list[tuple[Sequence, int, bool]]:
    step = scheduler.schedule()
    done = [(chunk.sequence, chunk.num_scheduled_tokens, chunk.samples) for chunk in step.chunks]
    for chunk in step.chunks:
        scheduler.computed(chunk)
    return done


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_samples():
    pool, scheduler = make(token_budget=16)
    (long,) = add(pool, scheduler, 40)
    assert [run_step(scheduler) for _ in range(3)] == [
        [(long, 16, False)],
        [(long, 16, False)],
        [(long, 8, True)],
    ]
    assert run_step(scheduler) == []
    assert scheduler.num_running == scheduler.num_waiting == 0


def test_short_prompts_share_a_step():
    pool, scheduler = make(token_budget=16)
    first, second, third = add(pool, scheduler, 5, 6, 20)
    assert run_step(scheduler) == [(first, 5, True), (second, 6, True), (third, 5, False)]


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 15, 16, 17])
def test_a_prompt_takes_exactly_the_blocks_that_it_covers(length: int):
    pool, scheduler = make()
    (sequence,) = add(pool, scheduler, length)
    scheduler.schedule()
    assert len(sequence.table.block_ids) == -(-length // BLOCK)


def test_a_prompt_takes_no_blocks_before_its_first_chunk():
    pool, scheduler = make(token_budget=16)
    _, second = add(pool, scheduler, 20, 20)
    assert len(run_step(scheduler)) == 1
    assert len(second.table.block_ids) == 0
    assert [sequence for sequence, _, _ in run_step(scheduler)][1] is second


def test_identical_prompts_in_one_tick_are_computed_once():
    pool, scheduler = make(token_budget=64)
    sequences = [new_sequence(pool, unique_tokens(41)) for _ in range(16)]
    for sequence in sequences:
        scheduler.add(sequence)
    num_computed = 0
    while chunks := run_step(scheduler):
        num_computed += sum(num_tokens for _, num_tokens, _ in chunks)
    assert all(sequence.num_remaining_tokens == 0 for sequence in sequences)
    assert num_computed == 41 + 15 * 1  # the first in full, the others their last token


def test_a_waiter_on_a_shared_prefix_goes_on_when_its_owner_is_removed():
    pool, scheduler = make(token_budget=8)
    first, second = (new_sequence(pool, unique_tokens(33)) for _ in range(2))
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    scheduler.remove(first)
    first.table.release()
    while run_step(scheduler):
        pass
    assert second.num_remaining_tokens == 0


def test_a_prompt_that_does_not_fit_is_passed_a_bounded_number_of_times():
    pool, scheduler = make(num_blocks=10, token_budget=64, max_num_seqs=2)
    (holder,) = add(pool, scheduler, 4 * BLOCK)
    run_step(scheduler)
    big = new_sequence(pool, unique_tokens(8 * BLOCK, start=50))
    scheduler.add(big)
    passed = 0
    for index in range(3 * MAX_BYPASS):
        small = new_sequence(pool, unique_tokens(BLOCK, start=100 + index))
        scheduler.add(small)
        if not run_step(scheduler):
            break
        small.table.release()
        passed += 1
    assert passed == MAX_BYPASS
    holder.table.release()
    pool.reset_cache()
    assert run_step(scheduler)[0][0] is big


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_everything_that_fits_is_computed_and_the_books_balance(data: st.DataObject):
    num_blocks = data.draw(st.integers(6, 30), label="num_blocks")
    pool, scheduler = make(num_blocks, token_budget=data.draw(st.integers(1, 40)), max_num_seqs=3)
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 40), label="num_operations")):
        match data.draw(st.sampled_from(["add", "step", "remove"])):
            case "add":
                shared = data.draw(st.integers(0, 3))
                tokens = unique_tokens(data.draw(st.integers(1, num_blocks * BLOCK)), start=shared)
                live.append(new_sequence(pool, tokens))
                scheduler.add(live[-1])
            case "step":
                assert sum(num_tokens for _, num_tokens, _ in run_step(scheduler)) <= 40
            case "remove" if live:
                gone = live.pop(data.draw(st.integers(0, len(live) - 1)))
                scheduler.remove(gone)
                gone.table.release()
        pool.check_integrity(sequence.table.block_ids for sequence in live)
    for _ in range(10_000):
        if not run_step(scheduler):
            done = [sequence for sequence in live if sequence.num_remaining_tokens == 0]
            if not done:
                break
            for sequence in done:  # what a Done does
                sequence.table.release()
                live.remove(sequence)
    assert live == []
    assert pool.counts().held == 0


def shares(scheduler: PrefillScheduler) -> dict[Sequence, int]:
    return {sequence: num_tokens for sequence, num_tokens, _ in run_step(scheduler)}


def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it():
    pool, scheduler = make(num_blocks=128, token_budget=16)
    first, second = add(pool, scheduler, 90, 100)
    assert shares(scheduler) == {first: 16}
    short = new_sequence(pool, unique_tokens(5, start=9))
    scheduler.add(short)
    assert shares(scheduler) == {first: 8 + 3, short: 5}
    assert shares(scheduler) == {first: 16}
    assert len(second.table.block_ids) == 0


def test_the_oldest_keeps_half_of_the_budget_however_many_short_ones_come():
    pool, scheduler = make(num_blocks=512, token_budget=16, max_num_seqs=64)
    (old,) = add(pool, scheduler, 80)
    num_steps = 0
    while old.num_remaining_tokens:
        for index in range(6):
            scheduler.add(new_sequence(pool, unique_tokens(4, start=1000 + 6 * num_steps + index)))
        assert shares(scheduler)[old] >= 8
        num_steps += 1
    assert num_steps == 10


def test_what_is_left_of_the_budget_goes_by_priority():
    pool, scheduler = make(num_blocks=128, token_budget=16)
    (old,) = add(pool, scheduler, 40)
    urgent, short = (
        new_sequence(pool, unique_tokens(length, start=200 + length), priority=priority)
        for length, priority in ((50, -1), (6, 0))
    )
    scheduler.add(short)
    scheduler.add(urgent)
    assert shares(scheduler) == {old: 8, urgent: 8}


def test_a_history_that_is_cached_makes_a_prompt_short():
    pool, scheduler = make(num_blocks=128, token_budget=16)
    tokens = unique_tokens(60, start=9)
    cached = new_sequence(pool, tokens)
    scheduler.add(cached)
    while run_step(scheduler):
        pass
    cached.table.release()
    old, middle = add(pool, scheduler, 100, 30)
    turn = new_sequence(pool, [*tokens, 7, 8])
    scheduler.add(turn)
    assert shares(scheduler) == {old: 8, turn: 2 + 60 % BLOCK, middle: 6}

"""The decode scheduler: batching, growth, preemption, admission, pulls."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import SamplingParams
from decode_worker.scheduler import DecodeScheduler
from decode_worker.slots import Stage
from decode_worker.step import DecodeStep
from kvstore.block_pool import BlockPool
from kvstore.sequence import Sequence
from tests.support.sequences import new_sequence, unique_tokens

BLOCK = 4


def make(
    num_blocks: int = 64, max_num_seqs: int = 8, token_budget: int = 32, local_chunk_tokens: int = 8
) -> tuple[BlockPool, DecodeScheduler]:
    pool = BlockPool(num_blocks, BLOCK)
    return pool, DecodeScheduler(
        pool, max_num_seqs=max_num_seqs, token_budget=token_budget, local_chunk_tokens=local_chunk_tokens
    )


def add_local(
    pool: BlockPool, scheduler: DecodeScheduler, length: int, start: int = 0, max_tokens: int = 8
) -> Sequence:
    sequence = new_sequence(pool, unique_tokens(length, start), max_tokens)
    scheduler.add(sequence)
    scheduler.compute_here(sequence)
    return sequence


def add_offered(pool: BlockPool, scheduler: DecodeScheduler, length: int, start: int = 0) -> Sequence:
    sequence = new_sequence(pool, unique_tokens(length, start))
    scheduler.add(sequence)
    scheduler.expect(sequence)
    scheduler.offered(sequence)
    return sequence


def run_step(scheduler: DecodeScheduler) -> DecodeStep:
    """Compute one step with a model that always says token 7; finished sequences leave."""
    step = scheduler.schedule(0.0)
    for chunk in step.chunks:
        samples = chunk.samples
        scheduler.computed(chunk)
        if samples:
            sequence = chunk.sequence
            sequence.token_ids.append(7)
            if sequence.num_output_tokens >= sequence.sampling.max_tokens:
                scheduler.retire(sequence)
                sequence.table.release()
    return step


def sizes(step: DecodeStep) -> list[int]:
    return [chunk.num_scheduled_tokens for chunk in step.chunks]


def test_decoding_sequences_come_first_and_a_local_prompt_gets_small_chunks():
    pool, scheduler = make(token_budget=32, local_chunk_tokens=8)
    add_local(pool, scheduler, 20)
    assert sizes(run_step(scheduler)) == [20]
    add_local(pool, scheduler, 20, start=1)
    assert [sizes(run_step(scheduler)) for _ in range(4)] == [[1, 8], [1, 8], [1, 4], [1, 1]]


def test_prompts_that_are_computed_gently_share_a_few_tokens_beside_answers_and_take_all_without():
    pool, scheduler = make(token_budget=32, local_chunk_tokens=8)
    first, second = (new_sequence(pool, unique_tokens(40, start)) for start in (1, 2))
    for sequence in (first, second):
        scheduler.add(sequence)
        scheduler.compute_here(sequence, gently=True)
    assert sizes(run_step(scheduler)) == [32]
    add_local(pool, scheduler, 5)
    assert sizes(run_step(scheduler)) == [8, 24]  # nobody decodes yet
    assert sizes(run_step(scheduler)) == [1, 3, 5]
    assert sizes(run_step(scheduler)) == [1, 1, 3]
    third = new_sequence(pool, unique_tokens(40, 3))
    scheduler.add(third)
    scheduler.compute_here(third, gently=True)
    assert sizes(run_step(scheduler)) == [1, 1, 3]


def test_a_gentle_prompt_takes_fewer_tokens_a_step_the_farther_it_has_come_but_never_none():
    pool, scheduler = make(num_blocks=600, local_chunk_tokens=64)
    add_local(pool, scheduler, 5, max_tokens=2000)
    run_step(scheduler)
    sequence = new_sequence(pool, unique_tokens(1200, 1))
    scheduler.add(sequence)
    scheduler.compute_here(sequence, gently=True)
    taken = []
    while sequence.num_remaining_tokens > 1:
        taken.append(sizes(run_step(scheduler))[1])
    assert taken == sorted(taken, reverse=True)
    assert (taken[0], taken[-1], sum(taken)) == (4, 1, 1199)


def test_a_block_is_taken_when_the_boundary_is_crossed():
    pool, scheduler = make()
    sequence = add_local(pool, scheduler, BLOCK - 1)
    run_step(scheduler)
    assert len(sequence.table.block_ids) == 1
    run_step(scheduler)  # writes the last slot of the first block
    assert len(sequence.table.block_ids) == 1
    run_step(scheduler)
    assert len(sequence.table.block_ids) == 2


def test_the_latest_arrival_is_preempted_and_finishes_later():
    pool, scheduler = make(num_blocks=6)
    first = add_local(pool, scheduler, 2 * BLOCK, start=0, max_tokens=2 * BLOCK)
    second = add_local(pool, scheduler, 2 * BLOCK, start=1, max_tokens=2 * BLOCK)
    preempted = []
    for _ in range(60):
        preempted += [slot.sequence for slot in run_step(scheduler).preempted]
    assert set(preempted) == {second}
    assert first.num_output_tokens == second.num_output_tokens == 2 * BLOCK
    assert scheduler.num_preemptions == len(preempted)
    assert pool.counts().held == 0


def test_a_preempted_sequence_is_computed_from_its_tokens_not_pulled_again():
    pool, scheduler = make(num_blocks=6)
    older = add_local(pool, scheduler, 2 * BLOCK, start=1, max_tokens=4 * BLOCK)
    run_step(scheduler)
    pulled = add_offered(pool, scheduler, 2 * BLOCK, start=2)
    assert [slot.sequence for slot in scheduler.schedule(0.0).pulls] == [pulled]
    pulled.token_ids.append(7)
    scheduler.pulled(pulled, 2 * BLOCK)
    steps = [run_step(scheduler) for _ in range(40)]
    assert pulled in [slot.sequence for step in steps for slot in step.preempted]
    assert [slot for step in steps for slot in step.pulls] == []
    assert older.num_output_tokens == 4 * BLOCK
    assert pulled.num_output_tokens == pulled.sampling.max_tokens


def test_scheduling_looks_past_heads_that_wait_for_their_offer():
    pool, scheduler = make(num_blocks=10)
    for start in range(3):
        sequence = new_sequence(pool, unique_tokens(2 * BLOCK, start))
        scheduler.add(sequence)
        scheduler.expect(sequence)
    runnable = add_local(pool, scheduler, BLOCK, start=9)
    assert [chunk.sequence for chunk in run_step(scheduler).chunks] == [runnable]


def test_a_failed_pull_keeps_the_valid_prefix_and_computes_the_rest():
    pool, scheduler = make()
    sequence = add_offered(pool, scheduler, 5 * BLOCK)
    scheduler.schedule(0.0)
    scheduler.pulled(sequence, 2 * BLOCK)
    step = scheduler.schedule(0.0)
    assert sizes(step) == [3 * BLOCK]
    assert step.chunks[0].samples


def test_a_pull_without_its_token_computes_the_last_token_again():
    pool, scheduler = make()
    sequence = add_offered(pool, scheduler, 2 * BLOCK)
    scheduler.schedule(0.0)
    scheduler.pulled(sequence, 2 * BLOCK)
    step = scheduler.schedule(0.0)
    assert sizes(step) == [1]
    assert step.chunks[0].samples


def test_a_sequence_that_nobody_planned_takes_no_blocks():
    pool, scheduler = make()
    sequence = new_sequence(pool, unique_tokens(9))
    scheduler.add(sequence)
    assert run_step(scheduler).chunks == ()
    assert pool.counts().held == 0
    scheduler.retire(sequence)
    assert scheduler.num_waiting == 0


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_no_more_sequences_run_than_allowed(max_num_seqs: int):
    pool, scheduler = make(max_num_seqs=max_num_seqs)
    for start in range(5):
        add_local(pool, scheduler, 3, start)
    assert len(run_step(scheduler).chunks) == max_num_seqs


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_all_sequences_finish_whatever_happens_and_the_books_balance(data: st.DataObject):
    num_blocks = data.draw(st.integers(4, 24), label="num_blocks")
    pool, scheduler = make(num_blocks, max_num_seqs=4, token_budget=16, local_chunk_tokens=4)
    capacity = num_blocks * BLOCK
    everyone: list[Sequence] = []

    def draw_tokens() -> tuple[list[int], int]:
        length = data.draw(st.integers(1, capacity - 1))
        return unique_tokens(length, data.draw(st.integers(0, 2))), data.draw(st.integers(1, capacity - length))

    def balance() -> None:
        pool.check_integrity(sequence.table.block_ids for sequence in scheduler.sequences())

    for _ in range(data.draw(st.integers(1, 40), label="num_operations")):
        pulling = [s for s in scheduler.sequences() if scheduler.stage(s) is Stage.PULLING]
        match data.draw(st.sampled_from(["local", "remote", "step", "pulled", "abort", "fallback"])):
            case "local" | "remote" as kind:
                tokens, max_tokens = draw_tokens()
                sequence = new_sequence(pool, tokens, max_tokens)
                everyone.append(sequence)
                scheduler.add(sequence)
                if kind == "local":
                    scheduler.compute_here(sequence)
                else:
                    scheduler.expect(sequence)
                    scheduler.offered(sequence)
            case "step":
                run_step(scheduler)
            case "pulled" if pulling:
                sequence = data.draw(st.sampled_from(pulling))
                num_valid = data.draw(st.integers(sequence.num_computed_tokens // BLOCK, sequence.num_tokens // BLOCK))
                scheduler.pulled(sequence, num_valid * BLOCK)
            case "abort" if scheduler.sequences():
                sequence = data.draw(st.sampled_from(scheduler.sequences()))
                scheduler.retire(sequence)
                sequence.table.release()
                everyone.remove(sequence)
            case "fallback" if scheduler.sequences():
                scheduler.compute_here(data.draw(st.sampled_from(scheduler.sequences())))
        balance()
    for _ in range(5_000):
        for sequence in scheduler.sequences():
            if scheduler.stage(sequence) is Stage.PULLING:
                scheduler.pulled(sequence, sequence.num_computed_tokens)
        if not scheduler.sequences():
            break
        run_step(scheduler)
        balance()
    assert scheduler.sequences() == []
    assert all(sequence.num_output_tokens == sequence.sampling.max_tokens for sequence in everyone)
    assert pool.counts().held == 0


def add_prompt_of(
    pool: BlockPool, scheduler: DecodeScheduler, length: int, num_samples: int, max_tokens: int = 8
) -> tuple[Sequence, list[Sequence]]:
    """Return the sequence of a prompt to compute here, and its samples."""
    prompt = add_local(pool, scheduler, length, max_tokens=max_tokens)
    prompt.sample_indices, prompt.num_forks = tuple(range(num_samples)), num_samples
    return prompt, [new_sequence(pool, unique_tokens(length), max_tokens) for _ in range(num_samples)]


def fork(scheduler: DecodeScheduler, prompt: Sequence, samples: list[Sequence]) -> None:
    """Do what the engine does with a computed prompt and the first token of each sample."""
    scheduler.fork(prompt, samples)
    scheduler.retire(prompt)
    prompt.table.release()
    for number, sample in enumerate(samples):
        sample.token_ids.append(1_000 + number)


@pytest.mark.parametrize("length", [2 * BLOCK, 2 * BLOCK + 1])
def test_samples_share_the_prompt_and_copy_only_its_partial_block(length: int):
    pool, scheduler = make()
    prompt, samples = add_prompt_of(pool, scheduler, length, 4)
    scheduler.computed(scheduler.schedule(0.0).chunks[0])
    fork(scheduler, prompt, samples)
    assert pool.counts().held == len(samples[0].table.block_ids)
    step = scheduler.schedule(0.0)
    is_partial = length % BLOCK > 0
    assert len(step.copies) == 3 * is_partial  # the last one to write has the block for itself
    assert len({copy.dst for copy in step.copies}) == len(step.copies)
    assert sizes(step) == [1] * 4
    assert pool.counts().held == 2 + 4
    pool.check_integrity([sample.table.block_ids for sample in samples])
    for chunk in step.chunks:
        scheduler.computed(chunk)
    assert scheduler.schedule(0.0).copies == ()


def test_a_prompt_of_several_samples_takes_their_places():
    pool, scheduler = make(max_num_seqs=4)
    add_local(pool, scheduler, BLOCK, start=1, max_tokens=20)
    prompt, _ = add_prompt_of(pool, scheduler, BLOCK, 4)
    for _ in range(3):
        assert prompt not in [chunk.sequence for chunk in run_step(scheduler).chunks]
    (other,) = [sequence for sequence in scheduler.sequences() if sequence is not prompt]
    scheduler.retire(other)
    other.table.release()
    assert [chunk.sequence for chunk in scheduler.schedule(0.0).chunks] == [prompt]


def test_a_pulled_prompt_whose_first_tokens_are_known_needs_no_logits():
    pool, scheduler = make()
    prompt = add_offered(pool, scheduler, 2 * BLOCK)
    prompt.num_forks = 2
    scheduler.schedule(0.0)
    prompt.sample_indices = ()
    scheduler.pulled(prompt, 2 * BLOCK)
    assert prompt.num_remaining_tokens == 0


def test_samples_without_a_block_left_for_a_copy_are_preempted_and_finish_later():
    pool, scheduler = make(num_blocks=4)
    prompt, samples = add_prompt_of(pool, scheduler, 2 * BLOCK + 1, 3, max_tokens=6)
    scheduler.computed(scheduler.schedule(0.0).chunks[0])
    fork(scheduler, prompt, samples)
    for _ in range(80):
        run_step(scheduler)
    assert [sample.num_output_tokens for sample in samples] == [6, 6, 6]
    assert scheduler.num_preemptions > 0
    assert pool.counts().held == 0


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole_in_small_chunks():
    pool, scheduler = make(num_blocks=200, token_budget=1_000)
    for _ in range(2):
        sequence = add_local(pool, scheduler, 300, max_tokens=1)
        sequence.sampling = SamplingParams(1, prompt_logprobs=0)
        scored = []
        while sequence in scheduler.sequences():
            scored += sizes(run_step(scheduler))
            sequence.scored(sequence.num_computed_tokens, ())
        assert scored == [128, 128, 44]

"""Prefill and decode workers together, over real gRPC and a real queue, against transformers' own tokens."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from common.messages import PlanKind
from common.sampling import FinishReason
from tests.support.reference import Reference
from tests.support.split import Answer, Split, split

pytestmark = pytest.mark.anyio

BLOCK, CHUNK = 16, 48
LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
KINDS = [PlanKind.LOCAL, PlanKind.REMOTE]
VOCABULARY = 200


@pytest.fixture
async def cluster(model: Path, redis_url: str, scheduling: str) -> AsyncIterator[Split]:
    async with split(str(model), redis_url, async_scheduling=scheduling) as running:
        yield running


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(3, VOCABULARY), k=length)


def check(answer: Answer, expected: list[int]) -> None:
    assert answer.error is None
    assert answer.token_ids == expected
    assert answer.finish is FinishReason.LENGTH


async def test_tokens_equal_generate_at_every_edge_cold_and_warm(cluster: Split, reference: Reference):
    for length in LENGTHS:
        for kind in KINDS:
            tokens = prompt(length, seed=KINDS.index(kind))
            expected = await reference.greedy_aside(tokens, 8)
            cold = await cluster.generate(tokens, kind)
            check(cold, expected)
            assert cold.started_cached == 0
            warm = await cluster.generate(tokens, kind)
            check(warm, expected)
            assert warm.started_cached == (length - 1) // BLOCK * BLOCK


async def test_sixteen_at_once_equal_each_alone(cluster: Split, reference: Reference, scheduling: str):
    prompts = [prompt(length, seed=9) for length in [*LENGTHS, 5, 77, 100, 18, 33]]
    kinds = [KINDS[index % 2] for index in range(16)]
    answers = await asyncio.gather(*map(cluster.generate, prompts, kinds))
    for tokens, answer in zip(prompts, answers, strict=True):
        check(answer, await reference.greedy_aside(tokens, 8))
    assert (cluster.decode.counters()["steps_launched_ahead"] > 0) is (scheduling == "on")


async def test_identical_prompts_in_one_tick_with_a_cold_cache(cluster: Split, reference: Reference):
    tokens = prompt(70, seed=3)
    answers = await asyncio.gather(*(cluster.generate(tokens) for _ in range(16)))
    for answer in answers:
        check(answer, await reference.greedy_aside(tokens, 8))
    assert cluster.prefill.counters()["prompt_tokens_computed"] == 70 + 15 * (70 - 64)


async def test_seeded_sampling_is_the_same_alone_batched_remote_and_local(cluster: Split):
    sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "max_tokens": 12}
    tokens = prompt(37, seed=4)
    alone = await cluster.generate(tokens, PlanKind.LOCAL, seed=77, **sampling)
    batch = await asyncio.gather(
        *(cluster.generate(tokens, KINDS[seed % 2], seed=seed, **sampling) for seed in range(70, 86))
    )
    assert batch[7].token_ids == alone.token_ids
    assert len({tuple(answer.token_ids) for answer in batch}) > 8


async def test_one_token_moves_no_blocks(cluster: Split, reference: Reference):
    tokens = prompt(40, seed=5)
    check(await cluster.generate(tokens, max_tokens=1), await reference.greedy_aside(tokens, 1))
    assert cluster.decode.counters()["pulled_tokens"] == 0
    assert cluster.decode.counters()["pulls_failed"] == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_end_of_sequence_as_the_first_token(
    cluster: Split, reference: Reference, kind: PlanKind, scheduling: str
):
    tokens = prompt(50, seed=6)
    (first,) = await reference.greedy_aside(tokens, 1)
    answer = await cluster.generate(tokens, kind, eos_token_ids=(first,))
    assert answer.token_ids == [first]
    assert answer.finish is FinishReason.STOP
    await cluster.wait_idle()
    num_dropped = int(scheduling == "on")  # launched before the end was known
    assert cluster.decode.counters()["steps"] == (0 if kind is PlanKind.REMOTE else 2 + num_dropped)


async def test_a_sequence_that_moved_here_goes_on_with_the_same_tokens(cluster: Split, reference: Reference):
    tokens = prompt(45, seed=7)
    expected = await reference.greedy_aside(tokens, 12)
    for kind in KINDS:
        rest = await cluster.generate(tokens + expected[:5], kind, num_prompt_tokens=45, max_tokens=12)
        assert rest.token_ids == expected[5:]


async def test_a_prompt_over_the_limit_is_refused_and_the_next_request_works(cluster: Split, reference: Reference):
    assert cluster.decode.parts is not None
    limit = cluster.decode.parts.model.spec.max_model_len
    refused = await cluster.generate(prompt(20), max_tokens=limit)
    assert refused.error == "invalid_request_error"
    check(await cluster.generate(prompt(20)), await reference.greedy_aside(prompt(20), 8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("leave_after", [0, 1, 5])
async def test_a_client_that_leaves_frees_its_blocks_and_disturbs_nobody(
    cluster: Split, reference: Reference, kind: PlanKind, leave_after: int
):
    stays = [prompt(60, seed=seed) for seed in range(20, 24)]
    leaves = [prompt(150, seed=seed) for seed in range(30, 36)]
    answers, _ = await asyncio.gather(
        asyncio.gather(*(cluster.generate(tokens, kind) for tokens in stays)),
        asyncio.gather(*(cluster.generate(tokens, kind, leave_after=leave_after, max_tokens=100) for tokens in leaves)),
    )
    for tokens, answer in zip(stays, answers, strict=True):
        check(answer, await reference.greedy_aside(tokens, 8))
    await cluster.wait_idle()


async def test_salts_share_nothing(cluster: Split):
    tokens = prompt(100, seed=8)
    for number in range(5):
        answer = await cluster.generate(tokens, salt=f"tenant {number}")
        assert answer.started_cached == 0
        assert answer.accepted_cached == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pool_too_small_for_all_preempts_and_every_answer_is_right(
    model: Path, redis_url: str, reference: Reference, kind: PlanKind, scheduling: str
):
    prompts = [prompt(40, seed=seed) for seed in range(40, 46)]
    async with split(str(model), redis_url, kv_blocks=12, async_scheduling=scheduling) as cluster:
        answers = await asyncio.gather(*(cluster.generate(tokens, kind, max_tokens=60) for tokens in prompts))
        for tokens, answer in zip(prompts, answers, strict=True):
            check(answer, await reference.greedy_aside(tokens, 60))
        counters = cluster.decode.counters()
        assert counters["preemptions"] > 0
        # What a preempted sequence computes again, or finds of its own, is neither a query nor a hit.
        assert counters["prefix_cache_queries"] == (240 if kind is PlanKind.LOCAL else 0)
        assert counters["prefix_cache_hits"] == 0


async def test_an_offer_that_overtakes_its_plan_waits_for_it(cluster: Split, reference: Reference):
    tokens = prompt(70, seed=12)
    check(await cluster.generate(tokens, plan_delay_s=0.3), await reference.greedy_aside(tokens, 8))
    assert cluster.prefill.counters()["offers_refused"] == 0
    assert cluster.decode.counters()["pulled_tokens"] == 70

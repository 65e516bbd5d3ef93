"""Several samples of one prompt: computed once, moved once, forked, each as if it were alone."""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from common.constraint import Constraint
from common.logprobs import TokenLogprobs
from common.messages import PlanKind, Sample
from common.sampling import FinishReason
from tests.support.reference import Reference
from tests.support.split import Answer, Split, split
from tests.support.tiny_models import EOS_TOKEN_ID

pytestmark = pytest.mark.anyio

BLOCK = 16
SAMPLING: dict[str, Any] = {"temperature": 1.2, "seed": 5, "max_tokens": 24, "logprobs": 2}
FOUR = tuple(map(Sample, range(4)))
LENGTHS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 70]


@pytest.fixture
async def cluster(model: Path, redis_url: str, scheduling: str) -> AsyncIterator[Split]:
    async with split(str(model), redis_url, async_scheduling=scheduling) as running:
        yield running


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(3, 200), k=length)


def tokens(answers: dict[int, Answer]) -> dict[int, list[int]]:
    return {index: answer.token_ids for index, answer in answers.items()}


async def alone(cluster: Split, token_ids: list[int], indices: tuple[int, ...] = (0, 1, 2, 3), **changes: Any) -> Any:
    """Return each sample as it is when nothing else runs."""
    return {
        index: (await cluster.generate(token_ids, PlanKind.LOCAL, sample_index=index, **(SAMPLING | changes))).token_ids
        for index in indices
    }


@pytest.mark.parametrize("kind", PlanKind)
async def test_each_sample_is_what_it_is_alone(cluster: Split, kind: PlanKind) -> None:
    for length in LENGTHS:
        token_ids = prompt(length)
        answers = await cluster.generate_all(token_ids, kind, FOUR, salt="own", **SAMPLING)
        assert tokens(answers) == await alone(cluster, token_ids)
        assert len({tuple(answer.token_ids) for answer in answers.values()}) == 4
        assert {answer.started_cached for answer in answers.values()} == {0}


@pytest.mark.parametrize("kind", PlanKind)
async def test_the_prompt_is_computed_once_and_moved_once(cluster: Split, kind: PlanKind) -> None:
    await cluster.generate_all(prompt(70), kind, FOUR, **SAMPLING)
    workers = (cluster.prefill, cluster.decode)
    assert sum(worker.counters()["prompt_tokens_computed"] for worker in workers) == 70
    is_remote = kind is PlanKind.REMOTE
    assert cluster.decode.counters()["pulls"] == is_remote
    assert cluster.decode.counters()["pulled_tokens"] == 70 * is_remote
    assert cluster.decode.counters()["forks"] == 4
    await cluster.wait_idle()


@pytest.mark.parametrize("kind", PlanKind)
async def test_samples_beside_others_are_the_same(cluster: Split, kind: PlanKind) -> None:
    prompts = [prompt(length, seed=1) for length in LENGTHS]
    together = await asyncio.gather(
        *(cluster.generate_all(token_ids, kind, FOUR, **SAMPLING) for token_ids in prompts),
        *(cluster.generate(token_ids, kind, **SAMPLING) for token_ids in prompts),
    )
    for token_ids, answers in zip(prompts, together[: len(prompts)], strict=True):
        assert isinstance(answers, dict)
        assert tokens(answers) == await alone(cluster, token_ids)


@pytest.mark.parametrize("kind", PlanKind)
async def test_samples_that_moved_here_in_mid_stream_go_on(cluster: Split, kind: PlanKind) -> None:
    token_ids = prompt(45)
    whole = await cluster.generate_all(token_ids, PlanKind.LOCAL, FOUR, **SAMPLING)
    cuts = {1: 1, 2: 9, 3: 20}  # sample 0 was complete
    moved = tuple(Sample(index, tuple(whole[index].token_ids[:cut])) for index, cut in cuts.items())
    rest = await cluster.generate_all(token_ids, kind, moved, salt="elsewhere", **SAMPLING)
    for index, cut in cuts.items():
        assert rest[index].token_ids == whole[index].token_ids[cut:]
        expected = [known.logprob for known in whole[index].logprobs[cut:]]
        assert [known.logprob for known in rest[index].logprobs] == pytest.approx(expected, abs=1e-4)
    (last,) = (await cluster.generate_all(token_ids, kind, moved[1:2], salt="third", **SAMPLING)).values()
    assert last.token_ids == whole[2].token_ids[9:]


@pytest.mark.parametrize("kind", PlanKind)
async def test_a_pool_too_small_for_all_samples_preempts_and_they_are_right(
    model: Path, redis_url: str, kind: PlanKind
) -> None:
    sampling = SAMPLING | {"max_tokens": 60}
    async with split(str(model), redis_url, kv_blocks=12) as cluster:
        answers = await cluster.generate_all(prompt(40), kind, FOUR, **sampling)
        assert cluster.decode.counters()["preemptions"] > 0
        assert tokens(answers) == await alone(cluster, prompt(40), **sampling)


@pytest.mark.parametrize("kind", PlanKind)
async def test_a_sample_that_ends_with_its_first_token_leaves_the_others_alone(cluster: Split, kind: PlanKind) -> None:
    token_ids = prompt(33)
    expected = await alone(cluster, token_ids)
    first = expected[0][0]
    assert any(first not in answer for answer in expected.values())
    answers = await cluster.generate_all(token_ids, kind, FOUR, salt="own", eos_token_ids=(first,), **SAMPLING)
    for index, answer in answers.items():
        full = expected[index]
        assert answer.token_ids == (full[: full.index(first) + 1] if first in full else full)
    assert answers[0].finish is FinishReason.STOP


async def test_one_token_each_moves_no_blocks(cluster: Split) -> None:
    sampling = SAMPLING | {"max_tokens": 1}
    answers = await cluster.generate_all(prompt(40), PlanKind.REMOTE, FOUR, **sampling)
    assert tokens(answers) == await alone(cluster, prompt(40), **sampling)
    assert cluster.decode.counters()["pulled_tokens"] == 0


@pytest.mark.parametrize("kind", PlanKind)
@pytest.mark.parametrize("leave_after", [0, 1, 5])
@pytest.mark.parametrize("leaves", [(), (1, 3)], ids=["all", "two"])
async def test_samples_that_are_given_up_free_their_blocks_and_disturb_nobody(
    cluster: Split, kind: PlanKind, leave_after: int, leaves: tuple[int, ...]
) -> None:
    token_ids = prompt(70, seed=leave_after)
    answers, other = await asyncio.gather(
        cluster.generate_all(token_ids, kind, FOUR, leave_after=leave_after, leaves=leaves, **SAMPLING),
        cluster.generate(prompt(50), kind, **SAMPLING),
    )
    await cluster.wait_idle()
    expected = await alone(cluster, token_ids)
    for index in {0, 2} if leaves else set():
        assert answers[index].token_ids == expected[index]
    assert other.token_ids == (await cluster.generate(prompt(50), **SAMPLING)).token_ids


async def test_more_samples_than_can_run_are_refused(model: Path, redis_url: str) -> None:
    async with split(str(model), redis_url, max_num_seqs=3) as cluster:
        answers = await cluster.generate_all(prompt(20), PlanKind.LOCAL, FOUR, **SAMPLING)
        assert {answer.error for answer in answers.values()} == {"invalid_request_error"}
        three = await cluster.generate_all(prompt(20), PlanKind.LOCAL, FOUR[:3], **SAMPLING)
        assert tokens(three) == await alone(cluster, prompt(20), (0, 1, 2))


# ---- log probabilities ----


def check(known: TokenLogprobs, token_id: int, row: torch.Tensor, num_top: int) -> None:
    """Compare with ``row [vocab]`` of a plain reference."""
    assert known.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
    assert known.rank == int((row > row[token_id] + 1e-6).sum()) + 1
    top = row.topk(num_top)
    assert list(known.top_ids) == top.indices.tolist()
    assert list(known.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", PlanKind)
async def test_log_probabilities_are_those_of_a_plain_reference(
    cluster: Split, reference: Reference, kind: PlanKind
) -> None:
    """Temperature, bias and penalties change what is sampled, not what is said of it."""
    token_ids = prompt(50)
    sampling = SAMPLING | {"logprobs": 3, "logit_bias": ((7, 5.0),), "presence_penalty": 0.5}
    answers = await cluster.generate_all(token_ids, kind, FOUR, **sampling)
    for answer in answers.values():
        rows = reference.logprobs(token_ids + answer.token_ids)
        assert len(answer.logprobs) == len(answer.token_ids)
        for n, (token_id, known) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
            check(known, token_id, rows[len(token_ids) + n - 1], 3)


@pytest.mark.parametrize("kind", PlanKind)
async def test_prompt_log_probabilities_are_those_of_a_plain_reference(
    cluster: Split, reference: Reference, kind: PlanKind
) -> None:
    """Also of a prompt that is cached, which then is computed all the same."""
    for length in (1, 2, 16, 33, 150, 150):
        token_ids = prompt(length, seed=2)
        answer = await cluster.generate(token_ids, kind, prompt_logprobs=2)
        assert answer.token_ids == await reference.greedy_aside(token_ids, 8)
        assert answer.logprobs == []
        assert answer.started_cached == 0
        assert answer.prompt_logprobs is not None
        assert len(answer.prompt_logprobs) == length - 1
        rows = reference.logprobs(token_ids)
        for token_id, row, known in zip(token_ids[1:], rows[:-1], answer.prompt_logprobs, strict=True):
            check(known, token_id, row, 2)


async def test_prompt_log_probabilities_survive_preemption(model: Path, redis_url: str, reference: Reference) -> None:
    prompts = [prompt(60, seed=seed) for seed in range(4)]
    async with split(str(model), redis_url, kv_blocks=12) as cluster:
        answers = await asyncio.gather(
            *(cluster.generate(one, PlanKind.LOCAL, prompt_logprobs=0, max_tokens=60) for one in prompts)
        )
        assert cluster.decode.counters()["preemptions"] > 0
    for token_ids, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == await reference.greedy_aside(token_ids, 60)
        assert answer.prompt_logprobs is not None
        rows = reference.logprobs(token_ids)
        expected = [float(row[token_id]) for row, token_id in zip(rows[:-1], token_ids[1:], strict=True)]
        assert [known.logprob for known in answer.prompt_logprobs] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", PlanKind)
async def test_each_sample_follows_its_structure_from_the_first_token_on(
    cluster: Split, model: Path, kind: PlanKind
) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    sampling = SAMPLING | {"constraint": Constraint.regex("[a-d]{3,9}"), "eos_token_ids": (EOS_TOKEN_ID,)}
    answers = await cluster.generate_all(prompt(40), kind, FOUR, **sampling)
    texts = [tokenizer.decode(answer.token_ids) for answer in answers.values()]
    assert all(re.fullmatch("[a-d]{3,9}", text) for text in texts)
    assert len(set(texts)) > 1
    assert {answer.finish for answer in answers.values()} == {FinishReason.STOP}
    moved = tuple(Sample(index, tuple(answer.token_ids[:1])) for index, answer in answers.items())
    rest = await cluster.generate_all(prompt(40), kind, moved, **sampling)
    assert tokens(rest) == {index: answer.token_ids[1:] for index, answer in answers.items()}

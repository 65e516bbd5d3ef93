"""Beam search through both workers: transformers' answers, whoever reads the prompt and however scarce blocks are."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.messages import PlanKind, Sample
from common.sampling import BeamParams, FinishReason
from tests.support.reference import PAD, Reference
from tests.support.split import Answer, Split, split
from tests.support.tiny_models import build

pytestmark = pytest.mark.anyio

ENDS = tuple(range(2, 500, 20))
"""So many that short answers are among the best."""

SEARCHES = [
    BeamParams(1),
    BeamParams(2),
    BeamParams(4),
    BeamParams(4, early_stopping=True),
    BeamParams(4, early_stopping="never"),
    BeamParams(3, length_penalty=0.0),
    BeamParams(3, length_penalty=-1.0, early_stopping="never"),
    BeamParams(4, length_penalty=2.0),
    BeamParams(4, length_penalty=2.0, early_stopping="never"),
    BeamParams(5, length_penalty=0.6, early_stopping=True),
]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    build(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture
async def cluster(model: Path, redis_url: str) -> AsyncIterator[Split]:
    async with split(str(model), redis_url) as running:
        yield running


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(3, 200), k=length)


async def search(
    cluster: Split,
    token_ids: list[int],
    kind: PlanKind,
    beam: BeamParams,
    n: int = 1,
    max_tokens: int = 12,
    **more: Any,
) -> list[Answer]:
    """Return the ``n`` best answers."""
    answers = await cluster.generate_all(
        token_ids,
        kind,
        tuple(map(Sample, range(n))),
        max_tokens=max_tokens,
        eos_token_ids=ENDS,
        beam=beam,
        logprobs=beam.num_candidates(len(ENDS)),
        **more,
    )
    return [answers[index] for index in range(n)]


def check(answers: list[Answer], expected: list[list[int]], max_tokens: int = 12) -> None:
    longest = len(expected[0])
    assert [answer.token_ids + [PAD] * (longest - len(answer.token_ids)) for answer in answers] == expected
    for answer in answers:
        ends = answer.token_ids[-1] in ENDS
        assert answer.finish is (FinishReason.STOP if ends else FinishReason.LENGTH)
        assert ends or len(answer.token_ids) == max_tokens


@pytest.mark.parametrize("kind", PlanKind)
async def test_answers_equal_transformers(cluster: Split, reference: Reference, kind: PlanKind) -> None:
    lengths = set()
    for seed, beam in enumerate(SEARCHES):
        token_ids = prompt((1, 16, 45)[seed % 3], seed)
        answers = await search(cluster, token_ids, kind, beam, n=beam.width)
        check(answers, await reference.beam_search(token_ids, beam, 12, ENDS))
        lengths |= {len(answer.token_ids) for answer in answers}
    assert len(lengths) > 3  # short ones and long ones were found


@pytest.mark.parametrize("kind", PlanKind)
async def test_one_token_and_the_best_only(cluster: Split, reference: Reference, kind: PlanKind) -> None:
    token_ids, beam = prompt(40), BeamParams(4)
    check(
        await search(cluster, token_ids, kind, beam, n=2, max_tokens=1),
        (await reference.beam_search(token_ids, beam, 1, ENDS))[:2],
        max_tokens=1,
    )
    check(await search(cluster, token_ids, kind, beam), (await reference.beam_search(token_ids, beam, 12, ENDS))[:1])


async def test_searches_beside_others_are_the_same_and_share_blocks(cluster: Split, reference: Reference) -> None:
    beam, kinds = BeamParams(4, early_stopping="never"), list(PlanKind)
    prompts = [prompt(60, seed) for seed in range(6)]
    found = await asyncio.gather(
        *(search(cluster, one, kinds[n % 2], beam, n=4, max_tokens=24) for n, one in enumerate(prompts)),
        *(cluster.generate(one, kinds[n % 2]) for n, one in enumerate(prompts)),
    )
    for token_ids, answers in zip(prompts, found[: len(prompts)], strict=True):
        assert isinstance(answers, list)
        check(answers, await reference.beam_search(token_ids, beam, 24, ENDS), max_tokens=24)
    counters = cluster.decode.counters()
    assert counters["saved_block_steps"] > 0.3 * counters["forked_block_steps"]


@pytest.mark.parametrize("kind", PlanKind)
async def test_with_blocks_for_one_or_two_beams_the_answers_are_the_same(
    model: Path, redis_url: str, reference: Reference, kind: PlanKind
) -> None:
    beam = BeamParams(4, length_penalty=2.0, early_stopping="never")
    for num_blocks in (6, 8):
        async with split(str(model), redis_url, kv_blocks=num_blocks) as cluster:
            answers = await search(cluster, prompt(30), kind, beam, n=4, max_tokens=45)
            assert cluster.decode.counters()["preemptions"] > 0
        check(answers, await reference.beam_search(prompt(30), beam, 45, ENDS), max_tokens=45)


async def test_a_search_that_is_given_up_frees_its_blocks(cluster: Split) -> None:
    beam = BeamParams(4, length_penalty=9.0, early_stopping="never")
    for kind in PlanKind:
        other = asyncio.create_task(cluster.generate(prompt(150), kind, max_tokens=30))
        gone = asyncio.create_task(search(cluster, prompt(40), kind, beam, max_tokens=1_000, leave_after=1))
        assert (await gone)[0].token_ids == []
        assert len((await other).token_ids) == 30
        await cluster.wait_idle()


async def test_more_beams_than_can_run_are_refused(model: Path, redis_url: str) -> None:
    async with split(str(model), redis_url, max_num_seqs=3) as cluster:
        (answer,) = await search(cluster, prompt(20), PlanKind.LOCAL, BeamParams(4))
        assert answer.error == "invalid_request_error"

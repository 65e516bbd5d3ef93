"""Every family of models through both workers: greedy, sampled, structured and searched, with blocks for two at a time.

What is asked does not fit the decode worker's pool, so that some of it is preempted on the way.
"""

import asyncio
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from common.constraint import Constraint
from common.messages import PlanKind, Sample
from common.sampling import BeamParams
from tests.support.reference import PAD, Reference
from tests.support.split import Split, split
from tests.support.tiny_models import EOS_TOKEN_ID, FAMILIES, build

pytestmark = pytest.mark.anyio

TIGHT = 11
"""Blocks for two of the answers at a time, which come to five blocks each."""
PROMPT_TOKENS, NUM_TOKENS, NUM_PROMPTS = 40, 36, 4

COLOURS = r"(red|green|blue)(, (red|green|blue)){3}"
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2}
STRUCTURED: dict[str, Any] = {
    "temperature": 0.8,
    "eos_token_ids": (EOS_TOKEN_ID,),
    "constraint": Constraint.regex(COLOURS),
}
BEAM, ENDS, SEARCHED_TOKENS = BeamParams(3), tuple(range(2, 500, 20)), 12


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    build(request.param, directory)
    return directory


@pytest.fixture
async def cluster(model: Path, redis_url: str) -> AsyncIterator[Split]:
    async with split(str(model), redis_url, kv_blocks=TIGHT) as running:
        yield running


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 120), k=PROMPT_TOKENS)


async def ask(cluster: Split, kind: PlanKind, **sampling: Any) -> list[list[int]]:
    options = {"max_tokens": NUM_TOKENS} | sampling
    answers = await asyncio.gather(
        *(cluster.generate(prompt(seed), kind, seed=seed, **options) for seed in range(NUM_PROMPTS))
    )
    assert {answer.error for answer in answers} == {None}
    return [answer.token_ids for answer in answers]


async def search(cluster: Split, kind: PlanKind) -> list[list[int]]:
    """Return all beams, filled up as the oracle does."""
    answers = await cluster.generate_all(
        prompt(0),
        kind,
        tuple(map(Sample, range(BEAM.width))),
        max_tokens=SEARCHED_TOKENS,
        eos_token_ids=ENDS,
        beam=BEAM,
        logprobs=BEAM.num_candidates(len(ENDS)),
    )
    found = [answers[index].token_ids for index in range(BEAM.width)]
    longest = max(map(len, found))
    return [token_ids + [PAD] * (longest - len(token_ids)) for token_ids in found]


async def test_every_way_of_answering_is_right_through_the_split(cluster: Split, model: Path) -> None:
    reference, tokenizer = Reference(model), Tokenizer.from_file(str(model / "tokenizer.json"))
    expected = [await reference.greedy_aside(prompt(seed), NUM_TOKENS) for seed in range(NUM_PROMPTS)]
    beams = await reference.beam_search(prompt(0), BEAM, SEARCHED_TOKENS, ENDS)
    alone = [
        (await cluster.generate(prompt(seed), PlanKind.LOCAL, seed=seed, max_tokens=NUM_TOKENS, **SAMPLED)).token_ids
        for seed in range(NUM_PROMPTS)
    ]
    structured = await ask(cluster, PlanKind.LOCAL, **STRUCTURED)
    for token_ids in structured:
        assert re.fullmatch(COLOURS, tokenizer.decode(token_ids))
    for kind in PlanKind:
        preempted = cluster.decode.counters()["preemptions"]
        assert await ask(cluster, kind) == expected
        assert cluster.decode.counters()["preemptions"] > preempted
        assert await ask(cluster, kind, **SAMPLED) == alone
        assert await ask(cluster, kind, **STRUCTURED) == structured
        assert await search(cluster, kind) == beams

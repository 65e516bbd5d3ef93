"""All sampling parameters together: the same tokens whoever computes the prompt, moved, preempted, alone or not."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from common.messages import PlanKind
from common.sampling import FinishReason
from tests.support.split import Answer, Split, split
from tests.support.tiny_models import EOS_TOKEN_ID

pytestmark = pytest.mark.anyio

EVERYTHING: dict[str, Any] = {
    "temperature": 1.3,
    "top_p": 0.95,
    "top_k": 60,
    "min_p": 0.001,
    "typical_p": 0.95,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": ((11, 3.0), (12, 3.0), (13, -50.0), (EOS_TOKEN_ID, 1.0)),
    "allowed_token_ids": tuple(range(120)),
    "bad_words": ((11, 12), (20,)),
    "min_tokens": 20,
    "eos_token_ids": (EOS_TOKEN_ID,),
    "stop_token_ids": (3,),
    "max_tokens": 40,
}


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 120), k=40)


async def answers(cluster: Split, kind: PlanKind) -> list[Answer]:
    return await asyncio.gather(*(cluster.generate(prompt(seed), kind, seed=seed, **EVERYTHING) for seed in range(6)))


async def test_all_parameters_together_give_the_same_tokens_everywhere(model: Path, redis_url: str, scheduling: str):
    async with split(str(model), redis_url, async_scheduling=scheduling) as cluster:
        alone = [await cluster.generate(prompt(seed), seed=seed, **EVERYTHING) for seed in range(6)]
        together = {kind: await answers(cluster, kind) for kind in PlanKind}
        for seed, answer in enumerate(alone):
            for kind in PlanKind:
                assert together[kind][seed].token_ids == answer.token_ids
            for cut in (1, 19, 20):
                moved = await cluster.generate(
                    prompt(seed) + answer.token_ids[:cut], num_prompt_tokens=40, seed=seed, **EVERYTHING
                )
                assert moved.token_ids == answer.token_ids[cut:]
    async with split(str(model), redis_url, kv_blocks=8, async_scheduling=scheduling) as cluster:
        for kind in PlanKind:
            assert [one.token_ids for one in await answers(cluster, kind)] == [one.token_ids for one in alone]
        assert cluster.decode.counters()["preemptions"] > 0
    for answer in alone:
        assert answer.finish is FinishReason.LENGTH or answer.token_ids[-1] in (3, EOS_TOKEN_ID)
        assert len(answer.token_ids) > 20
        assert not {3, EOS_TOKEN_ID} & set(answer.token_ids[:20])
        assert (11, 12) not in zip(answer.token_ids, answer.token_ids[1:], strict=False)
        assert 20 not in answer.token_ids


@pytest.mark.parametrize("kind", PlanKind)
async def test_min_tokens_holds_back_an_end_also_from_the_worker_that_samples_the_first_token(
    model: Path, redis_url: str, kind: PlanKind
):
    wants_to_end = {"logit_bias": ((EOS_TOKEN_ID, 100.0),), "eos_token_ids": (EOS_TOKEN_ID,), "max_tokens": 40}
    async with split(str(model), redis_url) as cluster:
        at_once = await cluster.generate(prompt(1), kind, **wants_to_end)
        assert (at_once.token_ids, at_once.finish) == ([EOS_TOKEN_ID], FinishReason.STOP)
        held = await cluster.generate(prompt(1), kind, min_tokens=16, **wants_to_end)
        assert len(held.token_ids) == 17
        assert (held.token_ids[-1], held.finish) == (EOS_TOKEN_ID, FinishReason.STOP)

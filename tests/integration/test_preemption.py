"""Preempted sequences, whatever becomes of their KV: the same tokens, nothing held, hits counted once."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from common.constraint import Constraint
from common.messages import PlanKind
from tests.support.split import Answer, Split, split
from tests.support.tiny_models import EOS_TOKEN_ID

pytestmark = pytest.mark.anyio

TIGHT = 14
"""Blocks for two of the requests at a time."""

ROWS = {"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 8, "maxItems": 8}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 60},
    "sampled": {"max_tokens": 60, "temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.2},
    "structured": {
        "max_tokens": 120,
        "temperature": 0.8,
        "eos_token_ids": (EOS_TOKEN_ID,),
        "constraint": Constraint.json_schema(json.dumps(ROWS)),
    },
}
MODES = ("recompute", "swap", "auto")


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(4, 120), k=40)


async def ask(cluster: Split, name: str, kind: PlanKind) -> list[Answer]:
    return await asyncio.gather(
        *(cluster.generate(prompt(seed), kind, seed=seed, priority=seed % 3, **KINDS[name]) for seed in range(6))
    )


def asked_tokens(cluster: Split) -> int:
    """Return the tokens that were looked up in the prefix caches, as the hit rate counts them."""
    return sum(host.counters()["prefix_cache_queries"] for host in (cluster.prefill, cluster.decode))


@pytest.mark.parametrize("mode", MODES)
async def test_tokens_are_those_of_an_undisturbed_run(model: Path, redis_url: str, mode: str, scheduling: str):
    expected: dict[str, list[list[int]]] = {}
    counted: dict[tuple[str, PlanKind], int] = {}
    async with split(str(model), redis_url) as cluster:
        for name in KINDS:
            for kind in PlanKind:
                before = asked_tokens(cluster)
                expected[name] = [answer.token_ids for answer in await ask(cluster, name, kind)]
                counted[name, kind] = asked_tokens(cluster) - before
    options = {"kv_blocks": TIGHT, "preemption": mode, "async_scheduling": scheduling}
    async with split(str(model), redis_url, **options) as cluster:
        for name in KINDS:
            for kind in PlanKind:
                before, preempted = asked_tokens(cluster), cluster.decode.counters()["preemptions"]
                assert [answer.token_ids for answer in await ask(cluster, name, kind)] == expected[name], (name, kind)
                assert cluster.decode.counters()["preemptions"] > preempted
                assert asked_tokens(cluster) - before == counted[name, kind] > 0
        swapped = cluster.decode.counters()["preemptions_swapped"]
        assert swapped == 0 if mode == "recompute" else swapped > 0


@pytest.mark.parametrize("name", KINDS)
async def test_the_prefill_worker_may_compute_a_preempted_one_again(model: Path, redis_url: str, name: str):
    async with split(str(model), redis_url) as cluster:
        expected = [answer.token_ids for answer in await ask(cluster, name, PlanKind.LOCAL)]
        counted = asked_tokens(cluster)
    async with split(str(model), redis_url, kv_blocks=TIGHT, preemption="recompute") as cluster:
        cluster.recomputes_remotely = True
        assert [answer.token_ids for answer in await ask(cluster, name, PlanKind.LOCAL)] == expected
        assert cluster.decode.counters()["preemptions"] > 0
        assert cluster.prefill.counters()["handovers"] > 0
        assert asked_tokens(cluster) - cluster.prefill.counters()["prefix_cache_queries"] == counted


async def test_an_urgent_request_is_done_before_what_was_there_first(model: Path, redis_url: str):
    async with split(str(model), redis_url, kv_blocks=TIGHT, preemption="swap") as cluster:
        done: list[str] = []

        async def one(name: str, seed: int, **options: Any) -> None:
            await cluster.generate(prompt(seed), PlanKind.LOCAL, **options)
            done.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(one("batch", 1, max_tokens=170, priority=10))
            while cluster.decode.counters()["generation_tokens"] < 60:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0)
            group.create_task(one("chat", 2, max_tokens=100, priority=-10))
        assert done == ["chat", "batch"]
        assert cluster.decode.counters()["preemptions_swapped"] == 1


@pytest.mark.parametrize("mode", MODES)
async def test_clients_that_leave_while_they_are_preempted_leave_nothing(
    model: Path, redis_url: str, mode: str, scheduling: str
):
    options = {"kv_blocks": TIGHT, "preemption": mode, "async_scheduling": scheduling}
    async with split(str(model), redis_url, **options) as cluster:
        for kind in PlanKind:
            await asyncio.gather(
                *(cluster.generate(prompt(seed), kind, max_tokens=100, leave_after=10 + 9 * seed) for seed in range(8))
            )
        await cluster.wait_idle()
        assert cluster.decode.counters()["preemptions"] > 0

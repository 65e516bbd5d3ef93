"""Every fault on every kind of process, with requests in every stage, streamed and not.

A cell puts requests into all stages at once, makes sure that they are there, does its damage, and then asserts what
holds for every cell: each client has a final answer in bounded time, every complete answer has the tokens of an
undisturbed run, no answer failed that should not, and nobody holds anything afterwards.
"""

import asyncio
import itertools
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import Answer, ChaosCluster, new_key
from tests.chaos.proxy import FaultProxy, Way
from tests.support.reference import Reference

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(420)]

ANSWER_S = 45.0
"""A client has its final answer within this time after a fault."""
MAX_TRIES = 15
HAND_OVER_BYTES_PER_S = 2e6
"""Prefill workers are behind lines so slow that a hand-over lasts long enough to be found, and broken, half-way."""
NUM_WRITING, NUM_READING = 4, 8
LONG_ANSWER, SHORT_ANSWER = 1200, 12
LONG_PROMPT, SHORT_PROMPT = 1400, 40

Prompts = dict[tuple[int, ...], list[int]]

FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "cut", "flip")
TARGETS = ("prefill", "decode", "gateway", "redis")
CELLS = [(fault, target) for target in TARGETS for fault in FAULTS]


@pytest.fixture(scope="module")
def prompts(model: Path) -> Prompts:
    """Prompts with their greedy answers, undisturbed."""
    reference = Reference(model)
    expected = {}
    for number in range(NUM_WRITING + NUM_READING):
        writes = number < NUM_WRITING
        length = SHORT_PROMPT if writes else LONG_PROMPT + number
        tokens = random.Random(number).choices(range(3, 200), k=length)
        expected[tuple(tokens)] = reference.greedy(tokens, LONG_ANSWER if writes else SHORT_ANSWER)
    return expected


def body(tokens: tuple[int, ...], expected: list[int], *, stream: bool) -> dict[str, Any]:
    return {
        "prompt": list(tokens),
        "max_tokens": len(expected),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }


async def in_every_stage(
    cluster: ChaosCluster, prompts: Prompts, target: str
) -> tuple[list[asyncio.Task[Answer]], str]:
    """Start the requests, half of them streams, on both gateways.

    Return them and the process of kind ``target`` that has most of them, when every stage is populated and it has its
    part of the stages. Requests may be through before anybody looks: then they are started again, with a cold cache.
    """
    for name in ("prefill-0", "prefill-1"):
        for proxy in lines_of(cluster, name):
            proxy.bytes_per_s = HAND_OVER_BYTES_PER_S
    for _ in range(MAX_TRIES):
        tasks = await start(cluster, prompts, new_key())
        async with asyncio.timeout(ANSWER_S):
            while not all(task.done() for task in tasks[NUM_WRITING:]):
                stages = await cluster.stages()
                name = aim(stages, target)
                if name is not None and not any(task.done() for task in tasks[:NUM_WRITING]):
                    return tasks, name
                await asyncio.sleep(0.02)
            await asyncio.wait(tasks)
    raise AssertionError(f"in {MAX_TRIES} tries the requests were not where the fault should find them")


async def start(cluster: ChaosCluster, prompts: Prompts, key: str) -> list[asyncio.Task[Answer]]:
    """Start those that write, and when they do, those that read."""
    tasks: list[asyncio.Task[Answer]] = []
    for number, (tokens, expected) in enumerate(prompts.items()):
        if number == NUM_WRITING:
            while not any(task.done() for task in tasks):
                stages = await cluster.stages()
                if [stage for one in stages.values() for stage in one].count("running") == NUM_WRITING:
                    break
                await asyncio.sleep(0.02)
        request = body(tokens, expected, stream=number % 2 == 0)
        tasks.append(asyncio.create_task(cluster.complete(f"gateway-{number // 2 % 2}", request, key=key)))
    return tasks


def aim(stages: dict[str, list[str]], target: str) -> str | None:
    """Return the process to break, or None while not every stage is populated there."""
    needed = {"prefill": {"waiting", "running"}, "decode": {"running", "pulling", "expecting"}}
    everywhere = {stage for one in stages.values() for stage in one}
    if not everywhere >= {"waiting", "expecting", "pulling", "running"}:
        return None
    if target not in needed:
        return target if target == "redis" else f"{target}-0"
    fit = [name for name, found in stages.items() if name.startswith(target) and set(found) >= needed[target]]
    return max(fit, key=lambda name: len(stages[name]), default=None)


async def do(cluster: ChaosCluster, fault: str, name: str) -> None:
    """Break one process, or what passes to and from it."""
    match fault:
        case "cut":
            for proxy in lines_of(cluster, name):
                proxy.cut()
        case "flip":
            for proxy, way, after in itertools.product(lines_of(cluster, name), Way, (12, 40, 90)):
                proxy.flip(way, after=after)
        case _:
            cluster.send(name, signal.Signals[fault])


def lines_of(cluster: ChaosCluster, name: str) -> list[FaultProxy]:
    """Return what bytes to and from a process pass through: for a gateway, which calls all others, everything."""
    proxy = cluster.nodes[name].proxy
    return [proxy] if proxy is not None else [node.proxy for node in cluster.nodes.values() if node.proxy is not None]


@pytest.mark.parametrize(("fault", "target"), CELLS, ids=[f"{fault}-{target}" for fault, target in CELLS])
async def test_cell(cluster: ChaosCluster, prompts: Prompts, fault: str, target: str) -> None:
    tasks, name = await in_every_stage(cluster, prompts, target)
    num_starts = cluster.nodes[name].process.num_starts
    await do(cluster, fault, name)
    is_broken = target == "gateway" and fault.startswith("SIG")
    own = [number for number in range(len(tasks)) if is_broken and number // 2 % 2 == 0]
    try:
        await all_done([task for number, task in enumerate(tasks) if number not in own])
    finally:
        cluster.heal()
    await all_done(tasks)  # a frozen gateway's own clients get their answers when it goes on
    check([await task for task in tasks], prompts, own)
    if fault in ("SIGKILL", "SIGTERM"):
        await cluster.wait_restarted(name, num_starts)
    await cluster.wait_ready()
    await cluster.wait_idle()


async def all_done(tasks: list[asyncio.Task[Answer]]) -> None:
    await asyncio.wait(tasks, timeout=ANSWER_S)
    hung = [number for number, task in enumerate(tasks) if not task.done()]
    assert not hung, f"no final answer within {ANSWER_S:g} s: {hung}"


def check(answers: list[Answer], prompts: Prompts, own: list[int]) -> None:
    """Clients of a gateway that was broken itself may see their connection end, never a wrong token."""
    for number, (answer, expected) in enumerate(zip(answers, prompts.values(), strict=True)):
        if answer.error is None and answer.finish is not None:
            assert answer.token_ids == expected, number
            assert answer.num_done == 1
        else:
            assert number in own, (number, answer)
            assert answer.token_ids == expected[: len(answer.token_ids)], number

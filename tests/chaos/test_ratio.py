"""The ratio of prefill to decode workers is changed under fifty streams: nothing fails, and no token changes."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.cluster import ADMIN, Answer, ChaosCluster, chaos_cluster, new_key
from tests.chaos.test_matrix import body
from tests.support.reference import Reference

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NUM_STREAMS = 50
NUM_PROMPTS = 10
NUM_TOKENS = 48
RATIOS = ("1:3", "3:1", "2:2")

Prompts = list[tuple[tuple[int, ...], list[int]]]


@pytest.fixture(scope="module")
def prompts(model: Path) -> Prompts:
    reference = Reference(model)
    drawn = [random.Random(f"ratio {n}").choices(range(3, 200), k=20 + 40 * n) for n in range(NUM_PROMPTS)]
    return [(tuple(tokens), reference.greedy(tokens, NUM_TOKENS)) for tokens in drawn]


@pytest.fixture
async def own_cluster(model: Path, tmp_path: Path) -> AsyncIterator[ChaosCluster]:
    """Workers change their roles here, so other tests would not know them by their names."""
    async with chaos_cluster(model, tmp_path, planner_drain_s=1.0) as running:
        yield running


async def call(cluster: ChaosCluster, **fields: Any) -> tuple[int, dict[str, Any]]:
    url = f"http://127.0.0.1:{cluster.nodes['gateway-0'].port}/v1/cluster/ratio"
    reply = await cluster.client.post(url, json=fields, headers={"Authorization": f"Bearer {ADMIN}"})
    return reply.status_code, reply.json()


async def test_changing_the_ratio_under_fifty_streams_fails_nothing_and_changes_no_token(
    own_cluster: ChaosCluster, prompts: Prompts
) -> None:
    stop, answers = asyncio.Event(), list[Answer]()

    async def stream(number: int) -> None:
        draw, key = random.Random(number), new_key()
        while not stop.is_set():
            tokens, expected = draw.choice(prompts)
            request = body(tokens, expected, stream=True)
            answer = await own_cluster.complete(f"gateway-{number % 2}", request, key=key)
            answers.append(answer)
            assert (answer.error, answer.num_done, answer.token_ids) == (None, 1, expected)

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_STREAMS):
            group.create_task(stream(number))
        took: list[str] = []
        for ratio in RATIOS:
            status, reply = await call(own_cluster, ratio=ratio)
            assert (status, reply["ratio"]) == (200, ratio), reply
            took += [f"{one['worker']} → {one['role']} {one['seconds']:.1f} s" for one in reply["changed"]]
        stop.set()
    await own_cluster.wait_idle()
    print(f"\n{len(answers)} answers under {NUM_STREAMS} streams, 0 failed, 0 changed; {'; '.join(took)}")  # noqa: T201
    assert len(took) == 1 + 2 + 1
    assert len(answers) >= NUM_STREAMS


async def test_what_cannot_be_is_refused_and_says_why(cluster: ChaosCluster) -> None:
    for ratio, said in (("1:2", "4 workers"), ("0:4", "at least one"), ("many", "PREFILL:DECODE")):
        status, reply = await call(cluster, ratio=ratio)
        assert status == 400
        assert said in reply["error"]["message"]
        assert reply["error"]["param"] == "ratio"
    assert await call(cluster, ratio="2:2") == (200, {"ratio": "2:2", "changed": []})
    url = f"http://127.0.0.1:{cluster.nodes['gateway-0'].port}/v1/cluster/ratio"
    assert (await cluster.client.post(url, json={"ratio": "1:3"})).status_code == 401

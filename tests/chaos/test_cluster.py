"""What operators and Redis do to a cluster under load: rolling restarts, flushes, full and slow servers."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.chaos.cluster import ADMIN, Answer, ChaosCluster, new_key
from tests.chaos.test_matrix import body
from tests.support.reference import Reference

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NUM_PROMPTS, NUM_CLIENTS = 12, 3
NUM_TOKENS = 60
THINK_S = 0.3

Prompts = list[tuple[tuple[int, ...], list[int]]]


@pytest.fixture(scope="module")
def prompts(model: Path) -> Prompts:
    reference = Reference(model)
    drawn = [random.Random(f"roll {n}").choices(range(3, 200), k=30 + 60 * n) for n in range(NUM_PROMPTS)]
    return [(tuple(tokens), reference.greedy(tokens, NUM_TOKENS)) for tokens in drawn]


@asynccontextmanager
async def load(cluster: ChaosCluster, prompts: Prompts, gateways: list[str]) -> AsyncIterator[list[Answer]]:
    """Keep ``NUM_CLIENTS`` clients asking the ``gateways`` named at the time; every answer must be whole and right."""
    answers: list[Answer] = []
    stop = asyncio.Event()

    async def client(number: int) -> None:
        draw, key = random.Random(number), new_key()
        while not stop.is_set():
            tokens, expected = draw.choice(prompts)
            request = body(tokens, expected, stream=draw.random() < 0.5)
            answer = await cluster.complete(draw.choice(gateways), request, key=key)
            answers.append(answer)
            assert answer.error is None, answer
            assert answer.token_ids == expected
            assert answer.num_done == 1
            await asyncio.sleep(THINK_S)

    async with asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            group.create_task(client(number))
        try:
            yield answers
        finally:
            stop.set()
    await cluster.wait_idle()


async def ended_with(cluster: ChaosCluster, name: str, num_exits: int) -> int:
    """Wait until the process has ended once more, and return its status."""
    process = cluster.nodes[name].process
    async with asyncio.timeout(30):
        while len(process.exits) == num_exits:  # noqa: ASYNC110 - another process ends
            await asyncio.sleep(0.05)
    return process.exits[-1]


async def test_a_rolling_restart_under_load_fails_nothing_and_changes_no_token(
    cluster: ChaosCluster, prompts: Prompts
) -> None:
    gateways = ["gateway-0", "gateway-1"]
    async with load(cluster, prompts, gateways) as answers:
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            num_exits, num_starts = len(cluster.nodes[name].process.exits), cluster.nodes[name].process.num_starts
            url = f"http://127.0.0.1:{cluster.nodes['gateway-0'].port}/v1/cluster/drain"
            headers = {"Authorization": f"Bearer {ADMIN}"}
            reply = await cluster.client.post(url, json={"worker": name}, headers=headers)
            assert reply.status_code == 200, reply.text
            assert await ended_with(cluster, name, num_exits) == 0
            await cluster.wait_restarted(name, num_starts)
        for name in ("gateway-0", "gateway-1"):
            gateways.remove(name)  # as a load balancer does when /ready says no
            num_exits, num_starts = len(cluster.nodes[name].process.exits), cluster.nodes[name].process.num_starts
            cluster.terminate(name)
            assert await ended_with(cluster, name, num_exits) == 0
            await cluster.wait_restarted(name, num_starts)
            gateways.append(name)
    assert len(answers) > 20


async def flush(cluster: ChaosCluster) -> None:
    await cluster.redis.flushall()


async def refuse_writes(cluster: ChaosCluster) -> None:
    await cluster.redis.config_set("maxmemory", "1")
    await asyncio.sleep(3)  # longer than a heartbeat and a poll
    await cluster.redis.config_set("maxmemory", "0")


async def answer_late(cluster: ChaosCluster) -> None:
    proxy = cluster.nodes["redis"].proxy
    assert proxy is not None
    proxy.delay_s = 2.0
    await asyncio.sleep(8)
    proxy.heal()


async def come_back_empty(cluster: ChaosCluster) -> None:
    """Away for long, then there again and empty; nobody loses a worker that was there all the time."""
    migrations = await num_migrations(cluster)
    cluster.send("redis", signal.SIGSTOP)
    await asyncio.sleep(6)
    cluster.send("redis", signal.SIGKILL)
    await cluster.wait_ready()
    await asyncio.sleep(3)
    assert await num_migrations(cluster) == migrations


async def num_migrations(cluster: ChaosCluster) -> float:
    total = 0.0
    for name in ("gateway-0", "gateway-1"):
        text = (await cluster.client.get(f"http://127.0.0.1:{cluster.nodes[name].port}/metrics")).text
        total += sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("baton_migrations_total "))
    return total


async def vanish(cluster: ChaosCluster) -> None:
    proxy = cluster.nodes["redis"].proxy
    assert proxy is not None
    proxy.is_dropping = True
    await asyncio.sleep(8)
    proxy.heal()
    proxy.cut()


@pytest.mark.parametrize(
    "trouble", [flush, refuse_writes, answer_late, come_back_empty, vanish], ids=lambda one: one.__name__
)
async def test_trouble_with_redis_under_load_fails_nothing(
    cluster: ChaosCluster, prompts: Prompts, trouble: Callable[[ChaosCluster], "asyncio.Future[None]"]
) -> None:
    async with load(cluster, prompts, ["gateway-0", "gateway-1"]) as answers:
        await trouble(cluster)
        await cluster.wait_ready()
        num_answers = len(answers)
        async with asyncio.timeout(30):
            while len(answers) < num_answers + NUM_CLIENTS:  # noqa: ASYNC110 - clients go on
                await asyncio.sleep(0.05)


async def test_admin_calls_need_the_admin_key(cluster: ChaosCluster) -> None:
    url = f"http://127.0.0.1:{cluster.nodes['gateway-0'].port}"
    for key in (new_key(), "", "wrong"):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        drained = await cluster.client.post(f"{url}/v1/cluster/drain", json={"worker": "prefill-0"}, headers=headers)
        looked = await cluster.client.get(f"{url}/debug/kv", headers=headers)
        assert (drained.status_code, looked.status_code) == (401, 401)
    admin = {"Authorization": f"Bearer {ADMIN}"}
    unknown = await cluster.client.post(f"{url}/v1/cluster/drain", json={"worker": "nobody"}, headers=admin)
    assert unknown.status_code == 404
    assert (await cluster.client.get(f"{url}/v1/models", headers=admin)).status_code == 401


async def test_keys_share_no_prefix(cluster: ChaosCluster, prompts: Prompts) -> None:
    tokens, expected = prompts[-1]
    cached = []
    for key in (new_key(), new_key()):
        for _ in range(2):
            reply = await cluster.client.post(
                f"http://127.0.0.1:{cluster.nodes['gateway-0'].port}/v1/completions",
                json=body(tokens, expected, stream=False),
                headers={"Authorization": f"Bearer {key}"},
            )
            cached.append(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] == cached[2] == 0

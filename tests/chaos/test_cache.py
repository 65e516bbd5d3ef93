"""The prefix index of real processes: what a killed worker held is asked of nobody, and nothing of it stays behind."""

import asyncio
import random
import signal
from pathlib import Path

import pytest

from kvstore.prefix_index import index_key
from tests.chaos.cluster import ChaosCluster, key_of, new_key
from tests.chaos.test_matrix import body
from tests.support.reference import Reference

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(180)]

NUM_TOKENS = 8
PROMPT_TOKENS = 1200
SEEN_S = 20.0
"""Far more than a record's or an entry's time to live, for machines that are busy."""


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


def draw(name: str, length: int) -> tuple[int, ...]:
    return tuple(random.Random(name).choices(range(3, 200), k=length))


async def holders(cluster: ChaosCluster, tokens: tuple[int, ...], key: str) -> dict[str, int]:
    """Return who holds how many tokens of a prompt, as the index says."""
    url = f"http://127.0.0.1:{cluster.nodes['gateway-0'].port}/v1/cache/lookup"
    reply = await cluster.client.post(url, json={"prompt": list(tokens)}, headers={"Authorization": f"Bearer {key}"})
    return {holder["worker"]: holder["cached_tokens"] for holder in reply.raise_for_status().json()["workers"]}


async def index_keys(cluster: ChaosCluster) -> dict[str, str]:
    """Return the key of the index entries of each worker's present life."""
    url = f"http://127.0.0.1:{cluster.nodes['gateway-0'].port}/v1/cluster"
    reply = await cluster.client.get(url, headers={"Authorization": f"Bearer {key_of(0)}"})
    workers = reply.raise_for_status().json()["workers"]
    return {one["id"]: index_key(one["id"], one["epoch"]) for one in workers}


async def ask(cluster: ChaosCluster, reference: Reference, tokens: tuple[int, ...], key: str) -> None:
    expected = reference.greedy(list(tokens), NUM_TOKENS)
    answer = await cluster.complete("gateway-0", body(tokens, expected, stream=False), key=key)
    assert answer.error is None, answer
    assert answer.token_ids == expected


async def test_a_killed_holders_entries_are_never_routed_to_and_swept(
    cluster: ChaosCluster, reference: Reference
) -> None:
    tokens, key = tuple(random.Random("killed").choices(range(3, 200), k=PROMPT_TOKENS)), new_key()
    await ask(cluster, reference, tokens, key)
    async with asyncio.timeout(SEEN_S):  # the index is told after the answer
        while not (held := await holders(cluster, tokens, key)):  # noqa: ASYNC110 - another process tells it
            await asyncio.sleep(0.05)
    victim = next(iter(held))
    dead = (await index_keys(cluster))[victim]
    assert await cluster.redis.exists(dead)
    num_starts = cluster.nodes[victim].process.num_starts
    cluster.send(victim, signal.SIGKILL)
    await ask(cluster, reference, tokens, key)  # at once: whatever the index still says costs time, not tokens
    await cluster.wait_restarted(victim, num_starts)
    async with asyncio.timeout(SEEN_S):  # its new life may hold the prompt again: it is the old one that must be gone
        lives = await index_keys(cluster)
        while lives.get(victim, dead) == dead or await cluster.redis.exists(dead):
            await asyncio.sleep(0.05)
            lives = await index_keys(cluster)
    assert {one.decode() for one in await cluster.redis.keys("baton:prefix:*")} <= set(lives.values())
    await cluster.wait_idle()

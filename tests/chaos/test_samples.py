"""A worker is killed while it writes several answers to one prompt: the same tokens, and the same log probabilities."""

import asyncio
import random
import signal
from typing import Any

import pytest

from tests.chaos.cluster import ChaosCluster, new_key

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NUM_TOKENS = 600
MAX_TRIES = 4
BODIES: dict[str, dict[str, Any]] = {
    "samples": {"n": 4, "seed": 7, "temperature": 1.1, "logprobs": 2},
    "echo": {"n": 2, "seed": 8, "logprobs": 1, "echo": True},
    "beams": {"n": 3, "use_beam_search": True, "beam_width": 4, "early_stopping": "never"},
}


async def ask(cluster: ChaosCluster, body: dict[str, Any]) -> dict[str, Any]:
    """Return the reply, which must be whole, asked for with a cold cache."""
    url = f"http://127.0.0.1:{cluster.nodes['gateway-0'].port}/v1/completions"
    reply = await cluster.client.post(url, json=body, headers={"Authorization": f"Bearer {new_key()}"})
    assert reply.status_code == 200, reply.text
    said: dict[str, Any] = reply.json()
    return said


async def caught_writing(cluster: ChaosCluster, body: dict[str, Any]) -> tuple[asyncio.Task[dict[str, Any]], str]:
    """Ask, and return the task and the decode worker that has forked sequences which run.

    The answer may be complete before anybody looks: then it is asked for again.
    """
    for _ in range(MAX_TRIES):
        task = asyncio.create_task(ask(cluster, body))
        while not task.done():
            for name, stages in (await cluster.stages()).items():
                if name.startswith("decode") and stages.count("running") > 1:
                    return task, name
            await asyncio.sleep(0.02)
    raise AssertionError(f"in {MAX_TRIES} tries nobody was seen writing")


@pytest.mark.parametrize("length", [40, 1_000], ids=["local", "remote"])
@pytest.mark.parametrize("kind", BODIES)
async def test_a_killed_decode_worker_changes_no_answer(cluster: ChaosCluster, kind: str, length: int) -> None:
    prompt = random.Random(f"{kind}/{length}").choices(range(3, 200), k=length)
    body = BODIES[kind] | {"prompt": prompt, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    expected = await ask(cluster, body)
    moved, name = await caught_writing(cluster, body)
    num_starts = cluster.nodes[name].process.num_starts
    cluster.send(name, signal.SIGKILL)
    said = await moved
    for choice, undisturbed in zip(said["choices"], expected["choices"], strict=True):
        assert choice["token_ids"] == undisturbed["token_ids"]
        assert (choice["text"], choice["finish_reason"]) == (undisturbed["text"], undisturbed["finish_reason"])
        if choice["logprobs"] is not None:
            known, before = (one["logprobs"]["token_logprobs"] for one in (choice, undisturbed))
            assert known == pytest.approx(before, abs=1e-3)
    assert said["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    await cluster.wait_restarted(name, num_starts)
    await cluster.wait_idle()

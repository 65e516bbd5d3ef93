"""Structured output whose decode worker is killed in the middle of an object."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.chaos.cluster import ChaosCluster, new_key

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

ITEM = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["color", "n"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 12, "maxItems": 12}
PROMPT_TOKENS, WRITTEN_TOKENS = 200, 60


def body(temperature: float, *, stream: bool) -> dict[str, Any]:
    return {
        "prompt": list(range(3, 3 + PROMPT_TOKENS)),
        "structured_outputs": {"json": SCHEMA},
        "max_tokens": 1800,
        "temperature": temperature,
        "seed": 5,
        "return_token_ids": True,
        "stream": stream,
    }


async def writer_of(cluster: ChaosCluster) -> str:
    """Return the decode worker that has written part of the answer."""
    while True:
        for worker in (await cluster.debug())["workers"]:
            for sequence in (worker["report"] or {"sequences": []})["sequences"]:
                if sequence["stage"] == "running" and sequence["num_tokens"] > PROMPT_TOKENS + WRITTEN_TOKENS:
                    return str(worker["worker"])
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("temperature", "stream"), [(0.0, True), (1.0, False)])
async def test_json_is_valid_and_the_same_when_its_decode_worker_is_killed(
    cluster: ChaosCluster, model: Path, temperature: float, stream: bool
) -> None:
    undisturbed = await cluster.complete("gateway-0", body(temperature, stream=stream), key=new_key())
    assert undisturbed.error is None
    task = asyncio.create_task(cluster.complete("gateway-0", body(temperature, stream=stream), key=new_key()))
    name = await writer_of(cluster)
    num_starts = cluster.nodes[name].process.num_starts
    cluster.send(name, signal.SIGKILL)
    answer = await task
    assert (answer.error, answer.finish, answer.num_done) == (None, "stop", 1)
    assert answer.token_ids == undisturbed.token_ids
    rows = json.loads(Tokenizer.from_file(str(model / "tokenizer.json")).decode(answer.token_ids))
    assert len(rows) == 12
    assert all(list(row) == ["color", "n"] and 0 <= row["n"] <= 99 for row in rows)
    await cluster.wait_restarted(name, num_starts)
    await cluster.wait_idle()

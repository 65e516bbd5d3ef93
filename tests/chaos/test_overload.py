"""More than the cluster can hold, for longer than a moment: 429 with a time to come back, and nothing goes wrong."""

import asyncio
import itertools
from collections import Counter
from pathlib import Path

import pytest

from tests.chaos.cluster import Answer, ChaosCluster, new_key
from tests.support.reference import Reference

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]

NUM_CLIENTS = 400
NUM_PROMPTS, PROMPT_TOKENS, NUM_TOKENS = 20, 400, 80
"""400 * 480 tokens; two decode workers of 900 blocks promise each slot twice, which is 57,600."""


async def test_who_is_refused_comes_back_when_told_and_everybody_is_served(cluster: ChaosCluster, model: Path) -> None:
    reference = Reference(model)
    prompts = [[3 + (seed * 31 + n * 7) % 400 for n in range(PROMPT_TOKENS)] for seed in range(NUM_PROMPTS)]
    expected = [await reference.greedy_aside(prompt, NUM_TOKENS) for prompt in prompts]
    statuses: Counter[int] = Counter()
    ended = itertools.count()
    order: dict[int, list[int]] = {200: [], 429: []}
    key = new_key()

    async def ask(number: int) -> Answer:
        body = {
            "prompt": prompts[number % NUM_PROMPTS],
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": number % 2 == 0,
        }
        answer = await cluster.complete("gateway-0", body, key=key)
        statuses[answer.status] += 1
        order.get(answer.status, []).append(next(ended))
        return answer

    async def client(number: int) -> None:
        while (answer := await ask(number)).status == 429:
            assert answer.retry_after_s is not None
            assert 1 <= answer.retry_after_s <= 60
            assert answer.token_ids == []
            await asyncio.sleep(answer.retry_after_s)
        assert (answer.status, answer.error, answer.finish, answer.num_done) == (200, None, "length", 1)
        assert answer.token_ids == expected[number % NUM_PROMPTS]

    await asyncio.gather(*map(client, range(NUM_CLIENTS)))
    assert set(statuses) == {200, 429}
    assert statuses[200] == NUM_CLIENTS
    assert statuses[429] >= NUM_CLIENTS // 20
    assert order[429][0] < order[200][NUM_CLIENTS // 4], "a refusal waits for nobody's answer"
    await cluster.wait_idle()

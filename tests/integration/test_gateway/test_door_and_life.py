"""Admission, keys, keep-alive, deadlines, start and shutdown."""

import asyncio
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.messages import BlockCounts
from gateway.config import GatewayConfig
from gateway.server import GatewayServer
from tests.support.gateway_bench import ANSWER, Bench, events_of
from tests.support.stub_decode import StubDecode
from tests.support.tiny_tokenizers import write_model

pytestmark = pytest.mark.anyio


async def paused(bench: Bench, after: int = 1) -> StubDecode:
    decode = await bench.decode()
    decode.faults.pause_after = after
    return decode


# ---- admission ----


async def test_beyond_the_limit_it_is_429_until_there_is_room(bench: Bench) -> None:
    decode = await paused(bench)
    await bench.gateway(max_requests=3)
    running = [asyncio.create_task(bench.complete()) for _ in range(3)]
    await decode.wait_for(lambda stub: len(stub.sequences) == 3)
    refused = await bench.complete()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["type"] == "overloaded_error"
    assert await bench.metric("baton_rejected_requests_total", reason="max_requests") == 1
    decode.resume()
    assert [(await task).status_code for task in running] == [200] * 3
    assert (await bench.complete()).status_code == 200


async def test_each_prompt_of_a_request_counts(bench: Bench) -> None:
    decode = await paused(bench)
    await bench.gateway(max_requests=3)
    running = asyncio.create_task(bench.complete(["a", "b"]))
    await decode.wait_for(lambda stub: len(stub.sequences) == 2)
    assert (await bench.complete(["a", "b"])).status_code == 429
    impossible = await bench.complete(["a"] * 4)
    assert (impossible.status_code, impossible.json()["error"]["param"]) == (400, "prompt")
    decode.resume()
    assert (await running).status_code == 200
    assert (await bench.complete(["a", "b", "c"])).status_code == 200


async def test_a_burst_over_the_kv_memory_is_refused_and_the_gateway_is_idle_afterwards(bench: Bench) -> None:
    decode = await bench.decode()
    decode.change(blocks=BlockCounts(20, 20, 0, 0, 0))
    await decode.beat()
    await bench.gateway()
    for _ in range(2):
        responses = await asyncio.gather(*(bench.complete(max_tokens=100) for _ in range(40)))
        statuses = [response.status_code for response in responses]
        assert set(statuses) == {200, 429}
        refused = [response for response in responses if response.status_code == 429]
        assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
        assert await bench.metric("baton_rejected_requests_total", reason="kv_capacity") >= len(refused)
        await bench.wait_until(lambda: not decode.sequences)
        assert (await bench.complete(max_tokens=100)).status_code == 200


async def test_a_thousand_requests_at_once_are_each_200_or_429(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.gateway(max_requests=200)
    responses = await asyncio.gather(*(bench.complete() for _ in range(1000)))
    statuses = [response.status_code for response in responses]
    assert set(statuses) <= {200, 429}
    assert statuses.count(200) >= 200
    assert all(response.json()["choices"][0]["text"] == ANSWER for response in responses if response.status_code == 200)
    assert decode.sequences == {}
    assert await bench.metric("baton_requests_in_flight") == 0


async def test_what_fails_gives_its_place_back(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway(max_requests=1)
    for _ in range(3):
        assert (await bench.complete(temperature=9)).status_code == 400
        assert (await bench.complete(model="other")).status_code == 404
        assert (await bench.complete()).status_code == 200


# ---- keys ----


async def test_without_keys_any_bearer_is_served(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway()
    response = await client.get("/v1/models", headers={"authorization": "Bearer anything"})
    assert response.status_code == 200


async def test_with_keys_only_those_are_served(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway(api_key=("first", "second"))
    for sent in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first"}, {"authorization": "Basic first"}):
        response = await client.post("/v1/completions", json={"prompt": "x"}, headers=sent)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.headers["x-request-id"]
    for key in ("first", "second"):
        sent = {"authorization": f"Bearer {key}"}
        assert (await client.post("/v1/completions", json={"prompt": "x"}, headers=sent)).status_code == 200
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/metrics")).status_code == 200


# ---- waiting ----


async def test_a_stream_that_waits_long_gets_its_headers_and_comments_first(bench: Bench) -> None:
    decode = await paused(bench, 0)
    client = await bench.gateway(headers_after_s=0.05, keep_alive_s=0.05)
    async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["x-baton-route"].startswith("local; ")
        parts = response.aiter_bytes()
        raw = await anext(parts)
        assert raw.startswith(b": keep-alive\n\n")
        decode.resume()
        raw += b"".join([part async for part in parts])
    assert "".join(event["choices"][0]["text"] for event in events_of(raw)) == ANSWER


async def test_comments_fill_a_gap_between_tokens(bench: Bench) -> None:
    decode = await paused(bench, 3)
    client = await bench.gateway(keep_alive_s=0.05)
    async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        raw = b""
        async for part in response.aiter_bytes():
            raw += part
            if raw.count(b": keep-alive\n\n") >= 2:
                decode.resume()
    assert "".join(event["choices"][0]["text"] for event in events_of(raw)) == ANSWER


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_ends_in_an_error(bench: Bench, stream: bool) -> None:
    decode = await paused(bench, 2)
    client = await bench.gateway(request_timeout_s=1.5)
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": stream})
    if stream:
        error = events_of(response.content)[-1]["error"]
    else:
        assert response.status_code == 504
        error = response.json()["error"]
    assert error["type"] == "timeout_error"
    await decode.wait_for(lambda stub: len(stub.aborts) == 1)


# ---- start and shutdown ----


async def test_a_taken_port_is_said_at_once(bench: Bench) -> None:
    await bench.gateway(is_ready=False)
    assert bench.server is not None
    with pytest.raises(ConfigError, match=f"--port {bench.server.port}.*in use"):
        GatewayServer(GatewayConfig("model", port=bench.server.port))


async def test_the_port_is_written_to_a_file(bench: Bench, tmp_path: Path) -> None:
    await bench.gateway(is_ready=False, port_file=tmp_path / "port")
    assert bench.server is not None
    assert (tmp_path / "port").read_text() == f"{bench.server.port}\n"


async def test_a_model_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    server = GatewayServer(GatewayConfig(str(tmp_path), port=0))
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        await server.run()


async def test_a_redis_url_that_is_none_ends_the_start(tmp_path: Path) -> None:
    server = GatewayServer(GatewayConfig(str(write_model(tmp_path)), port=0, redis="http://127.0.0.1"))
    with pytest.raises(ConfigError, match="--redis"):
        await server.run()


async def test_running_answers_end_before_the_gateway_does(bench: Bench) -> None:
    decode = await paused(bench, 2)
    await bench.gateway()
    assert bench.server is not None
    task = asyncio.create_task(bench.stream("/v1/completions", prompt="x"))
    await bench.wait_until(lambda: _has_tokens(decode, 2))
    bench.server.stop()
    await bench.wait_until(lambda: _refuses(bench))
    decode.resume()
    assert "".join(event["choices"][0]["text"] for event in await task) == ANSWER


async def test_answers_that_outlast_the_drain_end_in_an_error_event(bench: Bench) -> None:
    decode = await paused(bench, 2)
    await bench.gateway(drain_seconds=0.3)
    assert bench.server is not None
    task = asyncio.create_task(bench.stream("/v1/completions", prompt="x"))
    await bench.wait_until(lambda: _has_tokens(decode, 2))
    bench.server.stop()
    events = await task
    assert events[-1]["error"] == {
        "message": "the gateway is shutting down",
        "type": "unavailable_error",
        "param": None,
        "code": None,
    }
    await decode.wait_for(lambda stub: stub.sequences == {})


def _has_tokens(decode: StubDecode, count: int) -> bool:
    return any(sequence.num_output_tokens >= count for sequence in decode.sequences.values())


async def _refuses(bench: Bench) -> bool:
    """Whether new connections are refused."""
    assert bench.server is not None
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", bench.server.port)
    except ConnectionError:
        return True
    writer.close()
    return False

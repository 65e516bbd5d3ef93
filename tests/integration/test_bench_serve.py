"""``baton bench serve`` against a real gateway with stub workers: what it sends, measures and says."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from common.errors import ConfigError, Unavailable
from compose.bench.config import BenchServeConfig
from compose.bench.serve import bench_serve
from tests.support.gateway_bench import Bench, open_bench

pytestmark = pytest.mark.anyio
ANSWER = "Paris is the capital of France, and it lies on the river Seine."


@pytest.fixture
async def bench(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(redis, redis_url, tmp_path) as opened:
        await opened.decode(ANSWER)
        await opened.gateway()
        yield opened


async def run(bench: Bench, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    """Run the benchmark and return its JSON."""
    assert bench.server is not None
    small: dict[str, Any] = {"num_prompts": 12, "input_len": 20, "output_len": 8, "num_warmups": 1, "vocab_size": 256}
    await bench_serve(BenchServeConfig(**{"url": bench.server.url, "json": True} | small | options))
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


async def test_all_requests_are_answered_and_counted_as_the_server_counts(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await run(bench, capsys, detailed=True)
    assert (found["completed"], found["failed"], found["errors"]) == (12, 0, {})
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (240, 96)
    assert found["model_id"] == "stub-model"
    assert 0 < found["median_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert found["output_lens"] == [8] * 12
    assert len(found["ttfts"]) == len(found["itls"]) == 12
    submits = bench.decodes[0].submits
    assert len(submits) == 13
    assert all(len(submit.token_ids) == 20 and submit.sampling.max_tokens == 8 for submit in submits)


async def test_a_chat_is_measured_too(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    found = await run(bench, capsys, endpoint="chat", input_len=6)
    assert (found["completed"], found["total_output_tokens"]) == (12, 96)
    assert found["total_input_tokens"] > 12 * 6  # the server's count, template included


async def test_no_more_run_at_once_than_was_allowed(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert (await run(bench, capsys, max_concurrency=2))["max_concurrent_requests"] == 2
    assert (await run(bench, capsys))["max_concurrent_requests"] > 2


async def test_requests_are_sent_whether_or_not_earlier_ones_were_answered(bench: Bench) -> None:
    decode = bench.decodes[0]
    decode.faults.pause_after = 1
    assert bench.server is not None
    config = BenchServeConfig(
        url=bench.server.url, num_prompts=5, input_len=9, output_len=4, num_warmups=0, vocab_size=256, request_rate=50.0
    )
    running = asyncio.create_task(bench_serve(config))
    await decode.wait_for(lambda stub: len(stub.submits) == 5)
    decode.resume()
    await running


async def test_failures_are_told_by_their_reason(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unavailable, match="status 400"):
        await run(bench, capsys, num_warmups=0, input_len=300)
    found = json.loads(capsys.readouterr().out)
    assert (found["completed"], found["failed"]) == (0, 12)
    ((message, count),) = found["errors"].items()
    assert (count, "256" in message) == (12, True)


async def test_a_stream_that_breaks_off_is_a_failure(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    async def broken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b'24\r\ndata: {"choices": [{"text": "a"}]}\n\n\r\n')
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(broken, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unavailable, match="connection was lost"):
            await run(bench, capsys, url=f"http://127.0.0.1:{port}", model="any", num_warmups=0)


async def test_a_table_is_printed_and_the_json_saved(
    bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    await run_table(bench, tmp_path / "result.json")
    out = capsys.readouterr().out
    for words in ("requests completed", "output throughput", "goodput", "time to first token", "p99"):
        assert words in out
    saved = json.loads((tmp_path / "result.json").read_text())
    assert saved["request_goodput"] == pytest.approx(saved["request_throughput"])


async def run_table(bench: Bench, save: Path) -> None:
    assert bench.server is not None
    config = BenchServeConfig(
        url=bench.server.url,
        num_prompts=4,
        input_len=9,
        output_len=4,
        num_warmups=0,
        vocab_size=256,
        goodput=("ttft:60000",),
        save=save,
    )
    await bench_serve(config)


async def test_nobody_there_is_said_in_a_line() -> None:
    with pytest.raises(Unavailable, match="nothing answers"):
        await bench_serve(BenchServeConfig(url="http://127.0.0.1:1"))
    with pytest.raises(ConfigError, match="--url"):
        await bench_serve(BenchServeConfig(url="127.0.0.1:8000"))

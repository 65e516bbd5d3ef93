"""What a worker shows to whoever watches it."""

import asyncio
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.errors import ConfigError
from common.messages import Role
from kvstore.host.config import WorkerConfig
from kvstore.host.host import Host
from kvstore.host.metrics import HostMetrics
from kvstore.host.watch import WatchServer
from tests.support.split import split

pytestmark = pytest.mark.anyio


async def samples(port: int) -> dict[str, float]:
    """Return every sample without labels other than the worker's, by name."""
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {
        sample.name: sample.value
        for family in families
        for sample in family.samples
        if sample.labels.keys() <= {"worker", "role"}
    }


async def test_both_workers_measure_steps_and_the_decode_worker_the_pull(model: Path, redis_url: str) -> None:
    async with split(str(model), redis_url, metrics_port=0) as cluster:
        await cluster.generate(list(range(3, 63)), max_tokens=4)
        prefill, decode = await asyncio.gather(
            *(samples(host.metrics_port) for host in (cluster.prefill, cluster.decode))
        )
    assert prefill["baton_worker_step_seconds_count"] == prefill["baton_worker_steps_total"] > 0
    assert decode["baton_worker_step_sequences_count"] == decode["baton_worker_steps_total"] > 0
    assert decode["baton_kv_transfer_seconds_count"] == 1
    assert decode["baton_worker_pull_bytes_received_total"] > 0
    assert prefill["baton_worker_prefix_cache_queries_total"] == 60
    assert "process_resident_memory_bytes" in prefill


async def test_a_worker_says_when_it_is_ready(model: Path, redis_url: str) -> None:
    async with (
        split(str(model), redis_url, metrics_port=0) as cluster,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{cluster.decode.metrics_port}", trust_env=False) as client,
    ):
        assert (await client.get("/ready")).json() == {"status": "ready"}
        assert (await client.get("/health")).json() == {"status": "ok"}
        assert (await client.get("/elsewhere")).status_code == 404
        assert (await client.post("/ready")).status_code == 405
        assert (await client.head("/ready")).content == b""


async def test_a_worker_that_loads_is_alive_and_not_ready() -> None:
    server = WatchServer(HostMetrics().registry, lambda: "starting")
    port = await server.start("127.0.0.1", 0)
    try:
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            ready = await client.get("/ready")
            assert (ready.status_code, ready.json()) == (503, {"status": "starting"})
            assert (await client.get("/health")).status_code == 200
    finally:
        server.stop()


async def test_what_is_no_request_is_let_go() -> None:
    server = WatchServer(HostMetrics().registry, lambda: "")
    port = await server.start("127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"x" * 20_000)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        writer.close()
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
    finally:
        server.stop()


async def test_a_metrics_port_that_is_taken_is_said_before_the_model_loads(redis_url: str) -> None:
    first = WatchServer(HostMetrics().registry, lambda: "")
    port = await first.start("127.0.0.1", 0)
    try:
        config = WorkerConfig(model="not-looked-at", redis=redis_url, metrics_port=port)
        with pytest.raises(ConfigError, match=f"--metrics-port {port}"):
            await Host(config, Role.DECODE).run()
    finally:
        first.stop()

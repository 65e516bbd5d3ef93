"""What operators see: readiness, the cluster, metrics."""

import logging

import msgspec
import pytest

from common.logs import client_request
from common.messages import BlockCounts, SlotCounts, WorkerLoad
from tests.support.gateway_bench import ANSWER, Bench

pytestmark = pytest.mark.anyio
LONG = [5] * 100


async def test_ready_waits_for_a_prefill_worker_when_one_is_expected(bench: Bench) -> None:
    decode = await bench.decode()
    client = await bench.gateway(is_ready=False, prefill_expected=True)
    await bench.wait_workers(1)
    response = await client.get("/ready")
    assert (response.status_code, response.json()["error"]["message"]) == (503, "no prefill worker is ready")
    await bench.prefill(decode)
    await bench.wait_workers(2)
    assert (await client.get("/ready")).json() == {"status": "ready"}


async def test_the_cluster_is_shown(bench: Bench) -> None:
    decode = await bench.decode()
    decode.change(
        load=WorkerLoad(3, 2, 100, 50.0, 0.5),
        blocks=BlockCounts(100, 60, 20, 15, 5),
        slots=SlotCounts(240, 234),
    )
    await decode.beat()
    await bench.prefill(decode)
    client = await bench.gateway(prefill_expected=True)
    cluster = (await client.get("/v1/cluster")).json()
    assert cluster["workers"][0] == {
        "id": "decode-0",
        "role": "decode",
        "pid": 1,
        "epoch": decode.record.epoch,
        "address": decode.record.address,
        "state": "ready",
        "connected": True,
        "device": "cpu",
        "max_model_len": 256,
        "running": 3,
        "waiting": 2,
        "tick_age_s": 0.5,
        "blocks": {"total": 100, "free": 60, "cached": 20, "held": 15, "quarantined": 5},
        "slots": {"allocated": 240, "used": 234},
        "kv_waste": 0.025,
        "fingerprint": msgspec.to_builtins(decode.record.fingerprint),
    }
    assert [worker["id"] for worker in cluster["workers"]] == ["decode-0", "prefill-0"]
    assert cluster["ratio"] == {"prefill": 1, "decode": 1}
    assert cluster["totals"] == {
        "running": 3,
        "waiting": 2,
        "blocks": {"total": 10_100, "free": 10_060, "cached": 20, "held": 15, "quarantined": 5},
        "slots": {"allocated": 240, "used": 234},
        "kv_waste": 0.025,
    }
    assert cluster["redis"] == "up"


async def test_requests_are_measured(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.prefill(decode, cached_tokens=48)
    await bench.gateway(prefill_expected=True)
    await bench.complete(LONG)
    await bench.complete([6] * 10)
    await bench.complete(temperature=9)
    num_tokens = len(bench.tokens(ANSWER))
    vllm = {"model_name": "stub-model", "engine": "0"}
    expected = {
        ("baton_routes_total", "plan=remote", "reason=remote"): 1,
        ("baton_routes_total", "plan=local", "reason=short_prompt"): 1,
        ("baton_finished_requests_total", "finished_reason=stop"): 2,
        ("baton_prompt_tokens_total",): 110,
        ("baton_generation_tokens_total",): 2 * num_tokens,
        ("baton_prefix_cache_queries_total", "role=prefill"): 100,
        ("baton_prefix_cache_hits_total", "role=prefill"): 48,
        ("baton_prefix_cache_queries_total", "role=decode"): 10,
        ("baton_time_to_first_token_seconds_count",): 2,
        ("baton_inter_token_latency_seconds_count",): 2 * (num_tokens - 1),
        ("baton_request_time_per_output_token_seconds_count",): 2,
        ("baton_e2e_request_latency_seconds_count",): 2,
        ("baton_request_prefill_time_seconds_count",): 2,
        ("baton_request_prompt_tokens_sum",): 110,
        ("baton_http_requests_total", "handler=/v1/completions", "status=200"): 2,
        ("baton_http_requests_total", "handler=/v1/completions", "status=400"): 1,
        ("vllm:prefix_cache_queries_total",): 110,
        ("vllm:prefix_cache_hits_total",): 48,
        ("vllm:prompt_tokens_total",): 110,
        ("vllm:generation_tokens_total",): 2 * num_tokens,
        ("vllm:request_success_total", "finished_reason=stop"): 2,
        ("vllm:time_to_first_token_seconds_count",): 2,
        ("vllm:inter_token_latency_seconds_count",): 2 * (num_tokens - 1),
        ("vllm:e2e_request_latency_seconds_count",): 2,
    }
    found = {}
    for name, *labels in expected:
        wanted = dict(label.split("=", 1) for label in labels) | (vllm if name.startswith("vllm:") else {})
        found[name, *labels] = await bench.metric(name, **wanted)
    assert found == expected


async def test_workers_are_measured(bench: Bench) -> None:
    decode = await bench.decode()
    decode.change(
        load=WorkerLoad(3, 2, 100, 50.0, 0.5),
        blocks=BlockCounts(100, 60, 25, 15, 0),
        slots=SlotCounts(240, 234),
        counters={"preemptions": 7, "kv bytes": 12},
    )
    await decode.beat()
    await bench.gateway()
    worker = {"worker": "decode-0", "role": "decode"}
    assert await bench.metric("baton_worker_running", **worker) == 3
    assert await bench.metric("baton_worker_blocks", state="cached", **worker) == 25
    assert await bench.metric("baton_worker_slots", kind="used", **worker) == 234
    assert await bench.metric("baton_worker_preemptions_total", **worker) == 7
    assert await bench.metric("baton_worker_kv_bytes_total", **worker) == 12
    assert await bench.metric("baton_worker_up", state="ready", **worker) == 1
    assert await bench.metric("baton_redis_up") == 1
    assert await bench.metric("vllm:num_requests_running", engine="0") == 3
    assert await bench.metric("vllm:num_requests_waiting", engine="0") == 2
    assert await bench.metric("vllm:kv_cache_usage_perc", engine="0") == 0.15
    assert await bench.metric("vllm:num_preemptions_total", engine="0") == 7
    assert await bench.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="100") == 1


async def test_made_up_addresses_make_up_no_metrics(bench: Bench) -> None:
    client = await bench.gateway(is_ready=False)
    for n in range(3):
        await client.get(f"/nothing/{n}")
    assert await bench.metric("baton_http_requests_total", handler="none", status="404") == 3
    assert "/nothing/" not in (await client.get("/metrics")).text


async def test_each_answer_is_one_line_in_the_log(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    decode = await bench.decode()
    await bench.gateway()
    lines = _FlowLines()
    logger = logging.getLogger("gateway.request.flow")
    logger.addHandler(lines)
    try:
        with caplog.at_level(logging.INFO, "gateway.request.flow"):
            await bench.client.post("/v1/completions", json={"prompt": [6] * 10}, headers={"X-Request-Id": "mine-1"})
    finally:
        logger.removeHandler(lines)
    [(client, line)] = lines.seen
    assert client == "mine-1"
    assert line.startswith(f"{decode.submits[0].request_id}: stop, 10 + {len(bench.tokens(ANSWER))} tokens in ")
    assert line.endswith("local; prefill=none; decode=decode-0; cached=0; reason=short_prompt")


class _FlowLines(logging.Handler):
    """Keeps each message with the client's request id as it was when it was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((client_request.get(), record.getMessage()))

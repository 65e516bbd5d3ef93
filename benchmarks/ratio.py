"""The ratio of prefill to decode workers: a load that turns, live; flips under load; and what `baton tune` foretells.

    python -m benchmarks.ratio shift [--seconds 120] [--workers 4]
    python -m benchmarks.ratio accuracy [--seconds 60]

``shift``: one `baton up` of the small model, one thread a worker. The same arrivals, prompts ten times as long as
answers and then answers ten times as long as prompts, are served under every fixed ratio and then under the planner,
all in one run. Rates are a share of what the cluster was measured to do. Goodput counts complete answers within both
targets.

``accuracy``: calibrates as `baton tune` does on a cluster of 1:1, serves a load, simulates the same arrivals, and
prints both medians.

Workers on shared cores slow each other down, so on a machine with fewer cores than workers the ratios differ less than
on one with a device a worker, and whatever else runs there is in the figures.
"""

import argparse
import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import msgspec
from rich.console import Console
from rich.table import Table

from compose.tune.calibrate import calibrate, num_tokens
from compose.tune.cluster import SimCluster
from compose.tune.outcome import percentile
from compose.tune.profile import CostProfile
from compose.tune.trace import Arrival, poisson
from gateway.planner.pressure import Targets
from gateway.planner.ratio import Ratio
from tests.support.cluster import Cluster, running_cluster

FIRST_ID, LAST_ID = 1_000, 40_000
LOAD = 0.6
"""Share of what the best ratio can do that is asked for."""
OPTIONS = ("--threads", "1", "--kv-memory", "256MiB", "--max-model-len", "2048")


@dataclass(slots=True)
class Served:
    """One answer as its client saw it."""

    arrival: Arrival
    times: list[float] = field(default_factory=list)
    """Seconds from the request, one for each token."""
    error: str | None = None

    @property
    def itl_s(self) -> float:
        """Mean seconds between two tokens."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    def is_good(self, targets: Targets) -> bool:
        """Whether it is complete and within both targets."""
        whole = self.error is None and len(self.times) == self.arrival.answer_tokens
        return whole and self.times[0] <= targets.ttft_s and self.itl_s <= targets.itl_s


async def serve(url: str, arrivals: Sequence[Arrival]) -> list[Served]:
    """Send every request at its time and return what came back."""
    limits = httpx2.Limits(max_connections=1000, max_keepalive_connections=100)
    async with (
        httpx2.AsyncClient(base_url=url, timeout=600.0, trust_env=False, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        began = time.perf_counter()
        tasks = [group.create_task(_one(client, arrival, began + arrival.at_s)) for arrival in arrivals]
    return [task.result() for task in tasks]


async def _one(client: httpx2.AsyncClient, arrival: Arrival, at: float) -> Served:
    served = Served(arrival)
    await asyncio.sleep(max(0.0, at - time.perf_counter()))
    body = {
        "prompt": random.choices(range(FIRST_ID, LAST_ID), k=arrival.prompt_tokens),
        "max_tokens": arrival.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    began = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                served.error = f"status {answer.status_code}"
            async for line in answer.aiter_lines():
                served.times += [time.perf_counter() - began] * num_tokens(line)
                if line.startswith('data: {"error"'):
                    served.error = line
    except httpx2.HTTPError as error:
        served.error = type(error).__name__
    return served


# ---- a load that turns ----


def turning(profile: CostProfile, workers: int, seconds: float, targets: Targets) -> list[Arrival]:
    """Return prompts of 600 with answers of 60, then 60 with 600, as much as the best ratio can be asked for."""
    read_s = 600 / profile.prompt_tokens_per_s()
    reading = LOAD * (workers - 1) / read_s
    batch = max(1.0, (targets.itl_s * 0.7 - profile.decode_base_s) / max(profile.sequence_s, 1e-4))
    tokens_per_s = batch / (profile.decode_base_s + profile.sequence_s * batch)
    writing = LOAD * (workers - 1) * tokens_per_s / 600
    first = poisson(isl=600, osl=60, rate=reading, seconds=seconds)
    return first + poisson(isl=60, osl=600, rate=writing, seconds=seconds, start_s=seconds, seed=1)


def shift(seconds: float, workers: int, folder: Path) -> None:
    """Serve the turning load under each fixed ratio and under the planner, and print the table."""
    cores = len(os.sched_getaffinity(0))
    with running_cluster(folder / "probe", "--prefill", "1", "--decode", "1", *OPTIONS) as cluster:
        profile = asyncio.run(calibrate(cluster.url))
    slow = max(1.0, (workers - 1) / cores)  # of the workers that are busy in either phase
    targets = Targets(ttft_s=4 * 600 * slow / profile.prompt_tokens_per_s(), itl_s=6 * profile.decode_base_s * slow)
    arrivals = turning(_slower(profile, slow), workers, seconds, targets)
    table = Table(title=f"{workers} workers on {cores} cores; TTFT {targets.ttft_s:.2f} s, ITL {targets.itl_s:.3f} s")
    for name in ("ratio", "good 10:1", "good 1:10", "failed", "TTFT p50/p95 s, 10:1", "ITL p50/p95 ms, 1:10", "flips"):
        table.add_column(name)
    for ratio in [Ratio(number, workers - number) for number in range(1, workers)]:
        options = ("--prefill", str(ratio.prefill), "--decode", str(ratio.decode), *OPTIONS)
        with running_cluster(folder / f"fixed-{ratio.prefill}", *options) as cluster:
            served = asyncio.run(_warm_and_serve(cluster, arrivals))
        table.add_row(str(ratio), *_cells(served, seconds, targets), "")
    half = workers // 2
    planner = ("--planner", "auto", "--planner-ttft-s", f"{targets.ttft_s}", "--planner-itl-s", f"{targets.itl_s}")
    options = ("--prefill", str(half), "--decode", str(workers - half), *planner, *OPTIONS)
    with running_cluster(folder / "auto", *options) as cluster:
        served = asyncio.run(_warm_and_serve(cluster, arrivals))
        steps = [step for step in cluster.view().planner.steps if step.action != "hold"]
    flips = "; ".join(f"{step.ratio} {step.action} ({step.outcome})" for step in steps)
    table.add_row(f"auto, from {half}:{workers - half}", *_cells(served, seconds, targets), flips)
    Console(width=160).print(table)


def _slower(profile: CostProfile, factor: float) -> CostProfile:
    steps = ("prefill_base_s", "prompt_token_s", "prompt_attention_s")
    fields = (*steps, "decode_base_s", "sequence_s", "context_token_s")
    return msgspec.structs.replace(profile, **{name: factor * getattr(profile, name) for name in fields})


async def _warm_and_serve(cluster: Cluster, arrivals: Sequence[Arrival]) -> list[Served]:
    await serve(cluster.url, [Arrival(0.0, length, 8) for length in (300, 300, 300, 300, 30, 30, 30, 30)])
    return await serve(cluster.url, arrivals)


def _cells(served: Sequence[Served], seconds: float, targets: Targets) -> list[str]:
    first = [one for one in served if one.arrival.at_s < seconds]
    second = [one for one in served if one.arrival.at_s >= seconds]
    good = [f"{sum(one.is_good(targets) for one in part)} of {len(part)}" for part in (first, second)]
    failed = sum(one.error is not None or len(one.times) != one.arrival.answer_tokens for one in served)
    ttfts = [one.times[0] for one in first if one.times]
    itls = [one.itl_s * 1000 for one in second if one.times]
    return [
        *good,
        str(failed),
        f"{percentile(ttfts, 0.5):.2f} / {percentile(ttfts, 0.95):.2f}",
        f"{percentile(itls, 0.5):.0f} / {percentile(itls, 0.95):.0f}",
    ]


# ---- simulated against measured ----


def accuracy(seconds: float, folder: Path) -> None:
    """Print the medians of a measured load beside those of its simulation, and the difference."""
    ratio, targets = Ratio(1, 1), Targets(30.0, 1.0)
    with running_cluster(folder / "accuracy", "--prefill", "1", "--decode", "1", *OPTIONS) as cluster:
        profile = asyncio.run(calibrate(cluster.url))
        rate = 0.4 * profile.prompt_tokens_per_s() / 400
        arrivals = poisson(isl=400, osl=40, rate=rate, seconds=seconds, seed=5)
        served = asyncio.run(_warm_and_serve(cluster, arrivals))
    run = SimCluster(profile, ratio, targets).run(arrivals)
    measured = ([one.times[0] for one in served if one.times], [one.itl_s for one in served if one.times])
    simulated = ([one.ttft_s for one in run.requests], [one.itl_s for one in run.requests])
    table = Table(title=f"{len(arrivals)} requests of 400 + 40 tokens, {rate:.2f} a second, 1:1; medians in ms")
    for name in ("", "measured", "simulated", "difference"):
        table.add_column(name)
    for name, real, made in zip(("TTFT p50", "ITL p50"), measured, simulated, strict=True):
        true, said = percentile(real, 0.5), percentile(made, 0.5)
        table.add_row(name, f"{true * 1e3:.0f}", f"{said * 1e3:.0f}", f"{said / true - 1:+.0%}")
    console = Console(width=100)
    console.print(table)
    console.print(profile)


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("shift", "accuracy"))
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "shift":
            shift(options.seconds, options.workers, Path(folder))
        else:
            accuracy(options.seconds, Path(folder))


if __name__ == "__main__":
    main()

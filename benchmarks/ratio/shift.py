"""A load that turns from long prompts to long answers: every fixed ratio, then the planner, in one run.

Four workers whose steps are paced (:mod:`benchmarks.ratio.paced`), so that four devices exist in time on two cores;
gateway, planner, schedulers, transfers and changes of role are the real ones. The load is chosen so that each phase
needs three workers of one role, two are not enough, and one of the other role is. Goodput counts complete answers
within both targets, by the phase in which they arrived.
"""

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.ratio.load import WARM_UP, Served, serve
from benchmarks.ratio.machine import BusyCores
from benchmarks.ratio.paced import Pace
from benchmarks.ratio.paced_cluster import paced_cluster
from common.errors import Unavailable
from compose.status import fetch_cluster
from compose.tune.outcome import percentile
from compose.tune.profile import CostProfile
from compose.tune.trace import Arrival, poisson
from gateway.planner.planner import Action
from gateway.planner.pressure import Targets
from gateway.planner.ratio import Ratio

PROFILE = CostProfile(
    prefill_base_s=0.02,
    prompt_token_s=0.001,
    prompt_attention_s=0.0,
    decode_base_s=0.03,
    sequence_s=0.003,
    context_token_s=0.0,
    local_overhead_s=0.0,
    remote_overhead_s=0.0,
    transfer_base_s=0.0,
    transfer_token_s=0.0,
)
"""Of a device that reads some 960 tokens a second and writes at most 333; what lies between workers is real."""

TARGETS = Targets(ttft_s=4.0, itl_s=0.2)
NUM_WORKERS = 4
READING, READING_RATE = (500, 50), 3.9
WRITING, WRITING_RATE = (20, 200), 3.6
"""Tokens of prompt and answer, and requests a second, of the two phases."""

ENOUGH = 0.95
"""Share of the best fixed ratio's goodput that the planner has to reach in each phase."""

WATCH_S = 1.0
SETTLE_S = 3.0

Flips = list[tuple[float, str]]


class Run(msgspec.Struct, frozen=True):
    """The turning load under one ratio, or under the planner. Lists have an entry for each phase."""

    name: str
    num_requests: list[int]
    num_good: list[int]
    num_failed: int
    ttft_p50_s: list[float]
    ttft_p95_s: list[float]
    itl_p50_s: list[float]
    itl_p95_s: list[float]
    late_steps: float
    """Share of the steps that took longer than their pace."""
    busy_cores: float
    """Of the machine, mean, whoever used them."""
    flips: list[str]
    """What the planner did, with seconds from the load's start."""
    num_turns: int
    """Times that a worker was told to take the role that the one before it gave up."""


def turning(seconds: float) -> list[Arrival]:
    """Return ``seconds`` of long prompts and then as many of long answers."""
    (isl, osl), (short, long) = READING, WRITING
    reading = poisson(isl=isl, osl=osl, rate=READING_RATE, seconds=seconds)
    return reading + poisson(isl=short, osl=long, rate=WRITING_RATE, seconds=seconds, start_s=seconds, seed=1)


async def run_once(name: str, ratio: Ratio, planner: str, seconds: float, folder: Path) -> Run:
    """Serve the turning load on a fresh cluster of ``ratio``."""
    targets = {"planner_ttft_s": TARGETS.ttft_s, "planner_itl_s": TARGETS.itl_s}
    async with paced_cluster(ratio, PROFILE, folder, planner=planner, **targets) as cluster:
        await serve(cluster.url, WARM_UP, seed=1)
        await asyncio.sleep(SETTLE_S)
        cores, flips = BusyCores(), list[tuple[float, str, str]]()
        watching = asyncio.create_task(_watch(cluster.url, flips))
        served = await serve(cluster.url, turning(seconds))
        watching.cancel()
        busy_cores = cores.mean()
    return _summary(name, served, seconds, cluster.paces(), busy_cores, flips)


async def _watch(url: str, flips: list[tuple[float, str, str]]) -> None:
    """Keep what the planner begins, with the seconds since now, until cancelled."""
    clock = asyncio.get_running_loop().time
    began, seen = clock(), set[tuple[int, str]]()
    while True:
        with suppress(Unavailable):
            for step in (await fetch_cluster(url, "")).planner.steps:
                if step.action == Action.HOLD or step.outcome not in ("begun", "done"):
                    continue
                if (step.at_s, step.action) not in seen:
                    seen.add((step.at_s, step.action))
                    flips.append((clock() - began, step.action, f"{step.ratio} {step.reason}"))
        await asyncio.sleep(WATCH_S)


def _summary(
    name: str,
    served: Sequence[Served],
    seconds: float,
    paces: Sequence[Pace],
    busy_cores: float,
    flips: Sequence[tuple[float, str, str]],
) -> Run:
    phases = [[one for one in served if (one.arrival.at_s >= seconds) is later] for later in (False, True)]
    ttfts = [[one.ttft_s for one in phase if one.times] for phase in phases]
    itls = [[one.itl_s for one in phase if one.times] for phase in phases]
    roles = [action for _, action, _ in flips if action != Action.LOCAL_TOKENS]
    return Run(
        name=name,
        num_requests=[len(phase) for phase in phases],
        num_good=[sum(one.is_good(TARGETS) for one in phase) for phase in phases],
        num_failed=sum(one.has_failed for one in served),
        ttft_p50_s=[percentile(values, 0.5) for values in ttfts],
        ttft_p95_s=[percentile(values, 0.95) for values in ttfts],
        itl_p50_s=[percentile(values, 0.5) for values in itls],
        itl_p95_s=[percentile(values, 0.95) for values in itls],
        late_steps=sum(pace.num_late for pace in paces) / max(1, sum(pace.num_steps for pace in paces)),
        busy_cores=busy_cores,
        flips=[f"{at_s:.0f} s {action} ({why})" for at_s, action, why in flips],
        num_turns=sum(before != after for before, after in itertools.pairwise(roles)),
    )


def shift(seconds: float, names: Sequence[str], folder: Path) -> tuple[list[Run], bool]:
    """Serve the load under each of ``names``, print the table, and return the runs and whether ``auto`` held."""
    runs = []
    console = Console(width=150, stderr=True)
    for name in names:
        planner, ratio = ("auto", Ratio(2, 2)) if name == "auto" else ("off", _ratio(name))
        runs.append(asyncio.run(run_once(name, ratio, planner, seconds, folder / name.replace(":", "-"))))
        console.print(runs[-1])
    said, holds = verdict(runs)
    Console(width=150).print(_table(runs), said)
    return runs, holds


def verdict(runs: Sequence[Run]) -> tuple[str, bool]:
    """Say what the planner reached, and whether that is what it must: goodput, no failure, no turn but the load's."""
    auto = next((run for run in runs if run.name == "auto"), None)
    fixed = [run for run in runs if run is not auto]
    if auto is None or not fixed:
        return "no comparison", True
    best = [max(run.num_good[phase] for run in fixed) for phase in (0, 1)]
    shares = [good / max(1, most) for good, most in zip(auto.num_good, best, strict=True)]
    holds = min(shares) >= ENOUGH and auto.num_failed == 0 and auto.num_turns <= 1
    said = " and ".join(f"{share:.0%}" for share in shares)
    return (
        f"auto: {said} of the best fixed ratio, {auto.num_failed} failed, {auto.num_turns} turns: "
        f"{'holds' if holds else 'DOES NOT HOLD'}\n{'; '.join(auto.flips)}",
        holds,
    )


def _ratio(name: str) -> Ratio:
    prefill, _, decode = name.partition(":")
    return Ratio(int(prefill), int(decode))


def _table(runs: Sequence[Run]) -> Table:
    table = Table(
        title=f"{NUM_WORKERS} paced workers, {READING_RATE}/s of {READING[0]}+{READING[1]} tokens, then "
        f"{WRITING_RATE}/s of {WRITING[0]}+{WRITING[1]}; good: TTFT {TARGETS.ttft_s:g} s, ITL {TARGETS.itl_s:g} s"
    )
    for title in ("ratio", "good", "failed", "TTFT p50 / p95, s", "ITL p50 / p95, ms", "late steps", "cores busy"):
        table.add_column(title)
    for run in runs:
        table.add_row(
            run.name,
            "\n".join(f"{good} of {all_}" for good, all_ in zip(run.num_good, run.num_requests, strict=True)),
            str(run.num_failed),
            "\n".join(f"{p50:.2f} / {p95:.2f}" for p50, p95 in zip(run.ttft_p50_s, run.ttft_p95_s, strict=True)),
            "\n".join(
                f"{p50 * 1e3:.0f} / {p95 * 1e3:.0f}" for p50, p95 in zip(run.itl_p50_s, run.itl_p95_s, strict=True)
            ),
            f"{run.late_steps:.1%}",
            f"{run.busy_cores:.2f}",
        )
    return table

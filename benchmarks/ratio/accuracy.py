"""What `baton tune` foretells beside what is measured: the same arrivals, simulated and served.

One prefill and one decode worker of one thread each. The cluster is measured as `baton tune` does it, then serves
several loads; each is simulated with the profile that was measured. With ``--paced`` the workers' steps are paced, so
that what is shown is the model of the cluster and not that of the device, also on a machine that others use.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.ratio.load import WARM_UP, Served, serve
from benchmarks.ratio.machine import BusyCores
from benchmarks.ratio.paced_cluster import paced_cluster
from benchmarks.ratio.shift import PROFILE
from compose.tune.calibrate import calibrate
from compose.tune.cluster import SimCluster
from compose.tune.outcome import percentile
from compose.tune.profile import CostProfile
from compose.tune.trace import poisson
from gateway.planner.pressure import Targets
from gateway.planner.ratio import Ratio
from tests.support.cluster import running_cluster

WITHIN = 0.15
"""Both medians of a load must be this close."""

NUM_REQUESTS = 48
LOADS = ((400, 40, 0.3), (400, 40, 0.5), (800, 20, 0.4), (100, 100, 0.4))
"""Tokens of prompt and answer, and the share of what the busier of the two workers can do."""

PAUSE_S = 2.0


class Median(msgspec.Struct, frozen=True):
    """One figure of one load, in seconds."""

    load: str
    name: str
    num_requests: int
    measured_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Share by which the simulated one is above the measured one."""
        return self.simulated_s / self.measured_s - 1


class Accuracy(msgspec.Struct, frozen=True):
    """The whole comparison."""

    profile: CostProfile
    medians: list[Median]
    busy_cores: float


async def compare(url: str) -> Accuracy:
    """Measure the cluster behind ``url``, serve every load, and simulate each."""
    profile, cores = await calibrate(url), BusyCores()
    await serve(url, WARM_UP, seed=1)
    medians: list[Median] = []
    for number, (isl, osl, share) in enumerate(LOADS):
        await asyncio.sleep(PAUSE_S)
        rate = share * _capacity(profile, isl, osl)
        seconds = 2 * NUM_REQUESTS / rate
        arrivals = poisson(isl=isl, osl=osl, rate=rate, seconds=seconds, seed=number)[:NUM_REQUESTS]
        served = await serve(url, arrivals, seed=100 + number)  # prompts that nobody has seen
        medians += _medians(profile, served, f"{isl} + {osl} at {rate:.2f}/s")
    return Accuracy(profile, medians, cores.mean())


def _medians(profile: CostProfile, served: Sequence[Served], name: str) -> list[Median]:
    """Return what was measured beside what a simulation of the same arrivals says."""
    run = SimCluster(profile, Ratio(1, 1), Targets(30.0, 1.0)).run([one.arrival for one in served])
    whole = [one for one in served if not one.has_failed]
    pairs = {
        "TTFT p50": ([one.ttft_s for one in whole], [one.ttft_s for one in run.requests]),
        "ITL p50": ([one.itl_s for one in whole], [one.itl_s for one in run.requests]),
    }
    return [
        Median(name, figure, len(whole), percentile(real, 0.5), percentile(made, 0.5))
        for figure, (real, made) in pairs.items()
    ]


def _capacity(profile: CostProfile, isl: int, osl: int) -> float:
    """Return requests a second at which the prefill worker, or a decode worker of a batch of eight, has no rest."""
    step_s = profile.decode_base_s + 8 * (profile.sequence_s + profile.context_token_s * (isl + osl / 2))
    read_s = profile.prefill_base_s + isl * (profile.prompt_token_s + profile.prompt_attention_s * isl / 2)
    return min(1 / read_s, 8 / step_s / osl)


@asynccontextmanager
async def _cluster(*, paced: bool, folder: Path) -> AsyncIterator[str]:
    if paced:
        async with paced_cluster(Ratio(1, 1), PROFILE, folder / "paced") as cluster:
            yield cluster.url
        return
    options = ("--threads", "1", "--kv-memory", "256MiB", "--max-model-len", "2048")
    with running_cluster(folder / "up", *options) as running:
        yield running.url


async def _run(*, paced: bool, folder: Path) -> Accuracy:
    async with _cluster(paced=paced, folder=folder) as url:
        return await compare(url)


def accuracy(*, paced: bool, folder: Path) -> tuple[Accuracy, bool]:
    """Print every median beside the simulated one; return them, and whether all are within WITHIN."""
    found = asyncio.run(_run(paced=paced, folder=folder))
    table = Table(
        title=f"1:1, {'paced workers' if paced else 'one thread a worker'}; {found.busy_cores:.2f} cores busy"
    )
    for title in ("load", "requests", "", "measured, ms", "simulated, ms", "difference"):
        table.add_column(title)
    for one in found.medians:
        times = (f"{seconds * 1e3:.1f}" for seconds in (one.measured_s, one.simulated_s))
        table.add_row(one.load, str(one.num_requests), one.name, *times, f"{one.error:+.1%}")
    console = Console(width=110)
    console.print(table)
    console.print(found.profile)
    worst = max(abs(one.error) for one in found.medians)
    holds = worst <= WITHIN
    console.print(f"worst {worst:.1%}, at most {WITHIN:.0%}: {'holds' if holds else 'DOES NOT HOLD'}")
    return found, holds

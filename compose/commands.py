"""What the command ``baton`` can do: a cluster on this machine, or one process of one, and tools beside it.

The processes' own code is imported only when it is run, so that ``baton status`` is quick and ``baton gateway`` loads
no torch.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import App, Parameter

from common.cli import application, command
from common.messages import Role
from compose.bench.config import BenchServeConfig
from compose.bench.serve import bench_serve
from compose.cache_view import (
    CacheLookupConfig,
    CacheStatsConfig,
    CacheTopConfig,
    cache_lookup,
    cache_stats,
    cache_top,
)
from compose.console import result
from compose.doctor import DoctorConfig, doctor
from compose.drain import DrainConfig, drain
from compose.model_source import link_to, resolve_model
from compose.ratio import RatioConfig, RatioSetConfig, ratio, ratio_set
from compose.smollm2 import NAME
from compose.status import StatusConfig, status
from compose.top import TopConfig, top
from compose.tune_config import TuneConfig
from compose.up_command import up_command
from gateway.config import GatewayConfig
from kvstore.host.config import WorkerConfig


async def _gateway(config: GatewayConfig) -> None:
    from gateway.main import run_gateway

    await run_gateway(config)


async def _prefill(config: WorkerConfig) -> None:
    from kvstore.host.host import run_worker

    await run_worker(config, Role.PREFILL)


async def _decode(config: WorkerConfig) -> None:
    from kvstore.host.host import run_worker

    await run_worker(config, Role.DECODE)


def _fetch_model(name: str = NAME, /, *, link: Path | None = None) -> None:
    """Make a model ready and print its folder.

    Parameters
    ----------
    name
        A model that Baton prepares, a folder, or OWNER/NAME on the model hub.
    link
        Place of a symbolic link to the folder, for processes that are told of one place whatever the model.
    """
    folder = resolve_model(name)
    if link is not None:
        link_to(folder, link)
    result(str(folder))


def _drain(worker: str, /, *, config: Annotated[DrainConfig, Parameter(name="*")] | None = None) -> None:
    """Let one worker take nothing new, finish or hand over what it has, and exit; `baton up` starts it again.

    Parameters
    ----------
    worker
        Its id, as `baton status` shows it.
    """
    uvloop.run(drain(worker, config or DrainConfig()))


def _ratio_set(ratio: str, /, *, config: Annotated[RatioSetConfig, Parameter(name="*")] | None = None) -> None:
    """Change how many workers have which role, without a restart; running answers end or move.

    Parameters
    ----------
    ratio
        PREFILL:DECODE, such as 1:3; of as many workers as there are.
    """
    uvloop.run(ratio_set(ratio, config or RatioSetConfig()))


def _ratio() -> App:
    app = application("ratio", "Show, or change, how many workers have which role.")
    app.default(command(RatioConfig, ratio))
    app.command(_ratio_set, name="set")
    return app


async def _tune(config: TuneConfig) -> None:
    from compose.tune.tune import tune

    await tune(config)


def _version() -> None:
    """Print Baton's version."""
    result(version("baton"))


def _cache() -> App:
    app = application("cache", "Ask how well a running cluster's prefix cache works.")
    app.command(command(CacheStatsConfig, cache_stats), name="stats")
    app.command(command(CacheTopConfig, cache_top), name="top")
    app.command(command(CacheLookupConfig, cache_lookup), name="lookup")
    return app


def _bench() -> App:
    app = application("bench", "Measure a running server.")
    app.command(command(BenchServeConfig, bench_serve), name="serve")
    return app


def baton() -> App:
    """Return the command line."""
    app = application("baton", "Serve a language model with separate prefill and decode workers.")
    app.command(up_command(), name="up")
    app.command(command(GatewayConfig, _gateway), name="gateway", help="Run one gateway.")
    app.command(command(WorkerConfig, _prefill), name="prefill", help="Run one prefill worker.")
    app.command(command(WorkerConfig, _decode), name="decode", help="Run one decode worker.")
    app.command(command(StatusConfig, status), name="status")
    app.command(command(TopConfig, top), name="top")
    app.command(_cache())
    app.command(command(DoctorConfig, doctor), name="doctor")
    app.command(_bench())
    app.command(_ratio())
    app.command(command(TuneConfig, _tune), name="tune")
    app.command(_drain, name="drain")
    app.command(_fetch_model, name="fetch-model")
    app.command(_version, name="version")
    return app

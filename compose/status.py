"""``baton status``: who is in a running cluster, as a table."""

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from common.errors import Unavailable
from common.messages import BlockCounts, PlannerStep
from compose.gateway_client import accepted, open_gateway

WIDE = 120
"""Columns of a terminal that shows everything."""


@dataclass(frozen=True, slots=True)
class StatusConfig:
    """Print the workers of a running cluster, with their load and their blocks."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""

    api_key: str = ""
    """Key to send, where the gateway asks for one; of several the first."""


class WorkerView(msgspec.Struct, frozen=True):
    """One worker as ``GET /v1/cluster`` shows it; what else it shows is left alone."""

    id: str
    role: str
    pid: int
    epoch: int
    address: str
    state: str
    device: str
    running: int
    waiting: int
    blocks: BlockCounts
    max_model_len: int = 0


class Ratio(msgspec.Struct, frozen=True):
    """Workers by role."""

    prefill: int
    decode: int


class Pressure(msgspec.Struct, frozen=True):
    """How hard the pools are pressed; 1 is where the target is missed."""

    prefill: float = 0.0
    decode: float = 0.0
    prefill_wait: float = 0.0
    prefill_busy: float = 0.0
    kv_use: float = 0.0
    itl: float = 0.0
    admission: float = 0.0
    missing: str = ""


class Planner(msgspec.Struct, frozen=True):
    """Who plans the ratio, and what was decided last."""

    mode: str = "off"
    leader: str = ""
    home: str = ""
    local_prefill_tokens: int = 0
    steps: tuple[PlannerStep, ...] = ()


class ClusterView(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/cluster``."""

    workers: tuple[WorkerView, ...]
    ratio: Ratio
    pressure: Pressure = Pressure()
    planner: Planner = Planner()


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    title: str
    cell: Callable[[WorkerView], object]
    is_number: bool = False
    needs_width: bool = False
    """Left out of a narrow terminal."""


COLUMNS = (
    Column("worker", lambda worker: worker.id),
    Column("role", lambda worker: worker.role),
    Column("state", lambda worker: worker.state),
    Column("pid", lambda worker: worker.pid, is_number=True),
    Column("epoch", lambda worker: worker.epoch, is_number=True, needs_width=True),
    Column("address", lambda worker: worker.address, needs_width=True),
    Column("device", lambda worker: worker.device, needs_width=True),
    Column("running", lambda worker: worker.running, is_number=True),
    Column("waiting", lambda worker: worker.waiting, is_number=True),
    Column("held", lambda worker: worker.blocks.held, is_number=True),
    Column("cached", lambda worker: worker.blocks.cached, is_number=True),
    Column("free", lambda worker: worker.blocks.free, is_number=True),
    Column("quarantined", lambda worker: worker.blocks.quarantined, is_number=True, needs_width=True),
    Column("blocks", lambda worker: worker.blocks.total, is_number=True),
)


async def status(config: StatusConfig) -> None:
    """Print the table; raises Unavailable when no gateway answers."""
    cluster = await fetch_cluster(config.url, config.api_key)
    console = Console()
    console.print(cluster_table(cluster, console.width))


async def fetch_cluster(url: str, api_key: str = "") -> ClusterView:
    """Return the cluster behind the gateway at ``url``; raises Unavailable when it does not answer."""
    try:
        async with open_gateway(url, api_key) as client:
            answer = accepted(await client.get("/v1/cluster"))
        return msgspec.json.decode(answer.content, type=ClusterView)
    except msgspec.DecodeError as error:
        raise Unavailable(f"what answers at {url} is not a Baton gateway ({error})") from error


def cluster_table(cluster: ClusterView, width: int) -> Table:
    """Return the workers as a table, a row each; ``width`` is the terminal's."""
    columns = [column for column in COLUMNS if width >= WIDE or not column.needs_width]
    table = Table(box=SIMPLE_HEAD, padding=(0, 0))
    table.title = f"{cluster.ratio.prefill} prefill, {cluster.ratio.decode} decode"
    for column in columns:
        table.add_column(column.title, justify="right" if column.is_number else "left", no_wrap=True)
    for worker in cluster.workers:
        table.add_row(*(str(column.cell(worker)) for column in columns))
    return table

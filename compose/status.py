"""``baton status``: who is in a running cluster, as a table."""

from dataclasses import dataclass

import httpx2
import msgspec
from rich.console import Console
from rich.table import Table

from common.errors import Unavailable
from common.messages import BlockCounts
from compose.readiness import error_message

_COLUMNS = ("worker", "role", "state", "pid", "epoch", "address", "device", "running", "waiting")
_BLOCK_COLUMNS = ("held", "cached", "free", "quarantined", "total")


@dataclass(frozen=True, slots=True)
class StatusConfig:
    """Print the workers of a running cluster, with their load and their blocks."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""


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


class Ratio(msgspec.Struct, frozen=True):
    """Workers by role."""

    prefill: int
    decode: int


class ClusterView(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/cluster``."""

    workers: tuple[WorkerView, ...]
    ratio: Ratio


async def status(config: StatusConfig) -> None:
    """Print the table; raises Unavailable when no gateway answers."""
    cluster = await fetch_cluster(config.url)
    Console().print(cluster_table(cluster))


async def fetch_cluster(url: str) -> ClusterView:
    """Return the cluster behind the gateway at ``url``; raises Unavailable when it does not answer."""
    try:
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=5.0) as client:
            answer = await client.get("/v1/cluster")
            if answer.status_code != 200:
                raise Unavailable(f"{url} answers: {error_message(answer)}")
            return msgspec.json.decode(answer.content, type=ClusterView)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise Unavailable(f"no gateway answers at {url} ({error}); is `baton up` running?") from error
    except msgspec.DecodeError as error:
        raise Unavailable(f"what answers at {url} is not a Baton gateway ({error})") from error


def cluster_table(cluster: ClusterView) -> Table:
    """Return the workers as a table, a row each."""
    title = f"{cluster.ratio.prefill} prefill, {cluster.ratio.decode} decode"
    table = Table(title=title, title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in ("pid", "epoch", "running", "waiting") else "left")
    for name in _BLOCK_COLUMNS:
        table.add_column(f"blocks\n{name}", justify="right")
    for worker in cluster.workers:
        cells = [str(getattr(worker, "id" if name == "worker" else name)) for name in _COLUMNS]
        table.add_row(*cells, *(str(getattr(worker.blocks, name)) for name in _BLOCK_COLUMNS))
    return table

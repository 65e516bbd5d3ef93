"""``baton top``: a running cluster in the terminal, refreshed until it is interrupted."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import httpx2
import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.errors import ConfigError, Unavailable
from common.messages import BlockCounts
from compose.gateway_client import accepted, open_gateway

BAR_WIDTH = 24
_RATES = {"prompt": "baton_prompt_tokens_total", "answer": "baton_generation_tokens_total"}


@dataclass(frozen=True, slots=True)
class TopConfig:
    """Watch the workers of a running cluster: load, blocks and tokens a second; Ctrl-C ends it."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""

    api_key: str = ""
    """Key to send, where the gateway asks for one; of several the first."""

    every: float = 1.0
    """Seconds between two looks."""

    once: bool = False
    """Print one look and end."""

    def __post_init__(self) -> None:
        if not self.every > 0:
            raise ConfigError(f"--every must be above 0, not {self.every}")


class TopWorker(msgspec.Struct, frozen=True):
    """What is shown of a worker in ``GET /v1/cluster``."""

    id: str
    role: str
    state: str
    running: int
    waiting: int
    tick_age_s: float
    kv_waste: float
    blocks: BlockCounts


class TopCluster(msgspec.Struct, frozen=True):
    """What is shown of the answer."""

    workers: tuple[TopWorker, ...]
    redis: str


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the cluster; ``tokens`` are a gateway's counters at ``at_s``."""

    cluster: TopCluster
    tokens: Mapping[str, float]
    at_s: float


async def top(config: TopConfig) -> None:
    """Show the cluster until interrupted; raises Unavailable when no gateway answers any more."""
    async with open_gateway(config.url, config.api_key) as client:
        look = await _look(client, config.url)
        with Live(screen(look, look), auto_refresh=False, screen=not config.once) as live:
            while not config.once:
                await asyncio.sleep(config.every)
                before, look = look, await _look(client, config.url)
                live.update(screen(before, look), refresh=True)


async def _look(client: httpx2.AsyncClient, url: str) -> Look:
    answer, metrics = accepted(await client.get("/v1/cluster")), await client.get("/metrics")
    try:
        cluster = msgspec.json.decode(answer.content, type=TopCluster)
    except msgspec.DecodeError as error:
        raise Unavailable(f"what answers at {url} is not a Baton gateway ({error})") from error
    return Look(cluster, token_counts(metrics.text), asyncio.get_running_loop().time())


def token_counts(page: str) -> dict[str, float]:
    """Return the tokens of prompts and of answers in a gateway's /metrics."""
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("baton_"))
    return {name: float(values.get(sample, 0)) for name, sample in _RATES.items()}


def screen(before: Look, now: Look) -> Group:
    """Return what the terminal shows; rates are those between the two looks."""
    return Group(headline(before, now), workers_table(now.cluster))


def headline(before: Look, now: Look) -> Text:
    """Return one line about the whole cluster."""
    workers, elapsed_s = now.cluster.workers, now.at_s - before.at_s
    parts = [
        f"{sum(worker.role == role and worker.state == 'ready' for worker in workers)} {role}"
        for role in ("prefill", "decode")
    ]
    parts += [f"{sum(worker.running for worker in workers)} running", f"{sum(w.waiting for w in workers)} waiting"]
    if elapsed_s > 0:
        parts += [f"{(now.tokens[name] - before.tokens[name]) / elapsed_s:.0f} {name} tokens/s" for name in _RATES]
    style = "bold" if now.cluster.redis == "up" else "bold red"
    return Text(", ".join(parts) + ("" if now.cluster.redis == "up" else "; Redis is down"), style=style)


def workers_table(cluster: TopCluster) -> Table:
    """Return a row for each worker, prefill workers first."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for title in ("worker", "state", "running", "waiting", "blocks held, cached, free", "held", "waste", "step age"):
        is_word = title in ("worker", "state") or title.startswith("blocks")
        table.add_column(title, justify="left" if is_word else "right", no_wrap=True)
    for worker in sorted(cluster.workers, key=lambda worker: (worker.role != "prefill", worker.id)):
        table.add_row(
            worker.id,
            Text(worker.state, style="" if worker.state == "ready" else "yellow"),
            str(worker.running),
            str(worker.waiting),
            bar(worker.blocks),
            f"{worker.blocks.held}/{worker.blocks.total}",
            f"{100 * worker.kv_waste:.1f} %",
            f"{worker.tick_age_s:.1f} s" if worker.tick_age_s else "",
        )
    return table


def bar(blocks: BlockCounts) -> Text:
    """Return the pool as a bar: what sequences hold, what is cached, what is free; quarantined counts as held."""
    held = round(BAR_WIDTH * (blocks.held + blocks.quarantined) / max(1, blocks.total))
    cached = min(BAR_WIDTH - held, round(BAR_WIDTH * blocks.cached / max(1, blocks.total)))
    return Text.assemble(("█" * held, "red"), ("▒" * cached, "green"), "·" * (BAR_WIDTH - held - cached))

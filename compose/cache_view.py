"""``baton cache``: how well a running cluster's prefix cache works, as tables or as JSON."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx2
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from compose.console import result
from compose.gateway_client import accepted, open_gateway


@dataclass(frozen=True, slots=True)
class CacheStatsConfig:
    """Print the hit rates of a running cluster, in tokens: all of it, by role, and by worker."""

    window: Literal["60s", "5m", "1h", "all"] = "all"
    """Time that is looked back."""

    worker: str = ""
    """Only this worker."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""

    api_key: str = ""
    """Key to send, where the gateway asks for one; of several the first."""

    json: bool = False
    """Print the gateway's answer instead of tables."""

    watch: float = 0.0
    """Ask again every so many seconds, until interrupted; 0: once."""


@dataclass(frozen=True, slots=True)
class CacheTopConfig:
    """Print the shared prefixes that have saved most tokens."""

    top: int = 20
    """How many."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""

    api_key: str = ""
    """Key to send, where the gateway asks for one; of several the first."""

    json: bool = False
    """Print the gateway's answer instead of a table."""

    watch: float = 0.0
    """Ask again every so many seconds, until interrupted; 0: once."""


@dataclass(frozen=True, slots=True)
class CacheLookupConfig:
    """Print how much of a prompt is cached, and where."""

    prompt: str
    """Text of the prompt; a user's message with --chat."""

    chat: bool = False
    """Whether the text is a user's message, to be put through the chat template."""

    system: str = ""
    """System message before it, with --chat."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""

    api_key: str = ""
    """Key to send, where the gateway asks for one; of several the first."""

    json: bool = False
    """Print the gateway's answer instead of a table."""

    watch: float = 0.0
    """Ask again every so many seconds, until interrupted; 0: once."""


Config = CacheStatsConfig | CacheTopConfig | CacheLookupConfig


async def cache_stats(config: CacheStatsConfig) -> None:
    """Print hit rates; raises Unavailable when no gateway answers."""
    query = {"window": config.window} | ({"worker": config.worker} if config.worker else {})
    await _show(config, stats_table, "GET", "/v1/cache/stats", params=query)


async def cache_top(config: CacheTopConfig) -> None:
    """Print shared prefixes; raises Unavailable when no gateway answers."""
    await _show(config, top_table, "GET", "/v1/cache/prefixes", params={"top": config.top})


async def cache_lookup(config: CacheLookupConfig) -> None:
    """Print who holds a prompt; raises Unavailable when no gateway answers."""
    body: dict[str, Any] = {"prompt": config.prompt}
    if config.chat:
        system = [{"role": "system", "content": config.system}] if config.system else []
        body = {"messages": [*system, {"role": "user", "content": config.prompt}]}
    await _show(config, lookup_table, "POST", "/v1/cache/lookup", json=body)


async def _show(
    config: Config, table: Callable[[Mapping[str, Any]], Table], method: str, path: str, **options: Any
) -> None:
    async with open_gateway(config.url, config.api_key, timeout_s=10.0) as client:

        async def ask() -> httpx2.Response:
            return accepted(await client.request(method, path, **options))

        answer = await ask()
        if config.json:
            result(answer.text)
            while config.watch:
                await asyncio.sleep(config.watch)
                result((await ask()).text)
            return
        console = Console()
        if not config.watch:
            console.print(table(answer.json()))
            return
        with Live(table(answer.json()), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(config.watch)
                answer = await ask()
                live.update(table(answer.json()), refresh=True)


def stats_table(stats: Mapping[str, Any]) -> Table:
    """Return the answer of ``/v1/cache/stats`` as a table: a row for all, for each role and for each worker.

    A worker that has changed its role has a row for each.
    """
    blocks = stats["blocks"]
    table = _table(
        f"last {stats['window_s']:.0f} s: {stats['saved_prefill_seconds']:.1f} s of prefill saved, "
        f"{stats['evictions']} evictions, {blocks['cached']} of {blocks['total']} blocks cached"
    )
    for name in ("worker", "role", "queried", "hit", "rate", "local", "peer", "decode"):
        table.add_column(name, justify="left" if name in ("worker", "role") else "right", no_wrap=True)
    rows = [("all", "", stats), *(("all", role, counts) for role, counts in stats["by_role"].items())]
    rows += [(worker["worker"], worker["role"], worker) for worker in stats["by_worker"]]
    for name, role, counts in rows:
        source = counts["by_source"]
        table.add_row(
            name,
            role,
            str(counts["queries_tokens"]),
            str(counts["hit_tokens"]),
            f"{100 * counts['hit_rate']:.1f} %",
            *(str(source[key]) for key in ("local", "peer", "decode")),
        )
    return table


def top_table(answer: Mapping[str, Any]) -> Table:
    """Return the answer of ``/v1/cache/prefixes`` as a table, a row each."""
    table = _table("prefixes by tokens saved")
    for name in ("hash", "tokens", "saved", "requests", "rate", "holders", "used"):
        table.add_column(name, justify="left" if name in ("hash", "holders") else "right", no_wrap=True)
    table.expand = True  # so that the words get what the figures leave, and never the other way round
    table.add_column("first words", overflow="ellipsis", no_wrap=True, ratio=1)
    for prefix in answer["prefixes"]:
        table.add_row(
            prefix["hash"][:8],
            str(prefix["tokens"]),
            str(prefix["saved_tokens"]),
            str(prefix["requests"]),
            f"{100 * prefix['hit_rate']:.0f} %",
            str(len(prefix["holders"])),
            f"{prefix['last_used_s']:.0f} s",
            prefix["first_words"],
        )
    return table


def lookup_table(answer: Mapping[str, Any]) -> Table:
    """Return the answer of ``/v1/cache/lookup`` as a table, a row for each worker that holds something."""
    table = _table(f"{answer['cached_tokens']} of {answer['prompt_tokens']} tokens are cached")
    table.add_column("worker")
    table.add_column("role")
    table.add_column("cached tokens", justify="right")
    for worker in answer["workers"]:
        table.add_row(worker["worker"], worker["role"], str(worker["cached_tokens"]))
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE_HEAD, padding=(0, 1))

"""``baton ratio``: how many workers have which role and how hard each pool is pressed; ``set`` changes it live."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from common.errors import ConfigError
from common.messages import PlannerStep
from compose.console import note, result
from compose.gateway_client import accepted, open_gateway
from compose.readiness import error_message
from compose.status import ClusterView, fetch_cluster

_SHOWN_STEPS = 10

_WAIT_S = 900.0
"""A change of several workers, each with its running work, may take so long."""


@dataclass(frozen=True, slots=True)
class RatioConfig:
    """Print how many workers have which role, how hard each pool is pressed, and what the planner decided."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""

    api_key: str = ""
    """Key to send, where the gateway asks for one; of several the first."""


@dataclass(frozen=True, slots=True)
class RatioSetConfig:
    """Change how many workers have which role, without a restart; running answers end or move."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""

    admin_key: str = ""
    """Key for admin calls, where the gateway asks for one."""

    drain_s: float | None = None
    """Seconds that running work of a worker gets before it moves to others; none: what the gateway is set to."""


class Changed(msgspec.Struct, frozen=True):
    """One worker that has taken another role."""

    worker: str
    role: str
    seconds: float


class RatioReply(msgspec.Struct, frozen=True):
    """The answer of ``POST /v1/cluster/ratio``."""

    ratio: str
    changed: list[Changed]


async def ratio(config: RatioConfig) -> None:
    """Print the ratio and the pressures; raises Unavailable when no gateway answers."""
    cluster = await fetch_cluster(config.url, config.api_key)
    console = Console()
    console.print(pressure_table(cluster))
    planner = cluster.planner
    who = f"{planner.leader} plans" if planner.leader else "nobody plans"
    home = f", home is {planner.home}" if planner.home else ""
    result(f"planner {planner.mode}, {who}{home}; prompts up to {planner.local_prefill_tokens} tokens are read locally")
    if planner.steps:
        console.print(steps_table(planner.steps[-_SHOWN_STEPS:]))


def pressure_table(cluster: ClusterView) -> Table:
    """Return the pools as a table, a row each; 1 is where a target is missed."""
    seen = cluster.pressure
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), title=f"ratio {cluster.ratio.prefill}:{cluster.ratio.decode}")
    for name in ("pool", "workers", "pressure", "made of"):
        table.add_column(name, justify="left" if name in ("pool", "made of") else "right", no_wrap=True)
    prefill = f"queue {seen.prefill_wait:.2f}, busy {seen.prefill_busy:.0%}"
    decode = f"KV {seen.kv_use:.2f}, ITL {seen.itl:.2f}, wait for room {seen.admission:.2f}"
    table.add_row("prefill", str(cluster.ratio.prefill), f"{seen.prefill:.2f}", prefill)
    table.add_row("decode", str(cluster.ratio.decode), f"{seen.decode:.2f}", decode)
    if seen.missing:
        table.caption = f"not to be relied on, unknown is: {seen.missing}"
    return table


def steps_table(steps: Sequence[PlannerStep]) -> Table:
    """Return decisions of the planner as a table, a row each, with the smoothed pressures that they were made from."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), title="last decisions")
    for name in ("at", "ratio", "P, D, donor", "decision", "reason", "outcome"):
        table.add_column(name, no_wrap=name != "outcome")
    for step in steps:
        action = f"local {step.local_prefill_tokens}" if step.action == "local_tokens" else step.action
        pressures = " ".join(f"{value:.2f}" for value in (step.prefill, step.decode, step.donor_after))
        at = datetime.fromtimestamp(step.at_s).strftime("%H:%M:%S")
        table.add_row(at, step.ratio, pressures, action, step.reason, step.outcome)
    return table


async def ratio_set(ratio: str, config: RatioSetConfig) -> None:
    """Change the ratio and print how long each worker took.

    Raises ConfigError for a ratio that cannot be, Unavailable when it cannot be changed now.
    """
    body: dict[str, object] = {"ratio": ratio}
    if config.drain_s is not None:
        body["drain_s"] = config.drain_s
    note(f"changing to {ratio}")
    async with open_gateway(config.url, config.admin_key, timeout_s=_WAIT_S) as client:
        answer = await client.post("/v1/cluster/ratio", json=body)
    if answer.status_code == 400:
        raise ConfigError(error_message(answer))
    reply = msgspec.json.decode(accepted(answer).content, type=RatioReply)
    for change in reply.changed:
        result(f"{change.worker} became a {change.role} worker in {change.seconds:.2f} s")
    result(f"the ratio is {reply.ratio}")

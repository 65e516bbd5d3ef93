"""Options of ``baton up`` that are its processes' own, and are passed on to them.

Every field of a gateway's or a worker's configuration is one, unless ``baton up`` settles it itself; one that both have
goes to all. Name, type, default and help are the field's: nothing is described twice.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from docstring_parser import parse_from_object

from gateway.config import GatewayConfig
from kvstore.host.config import WorkerConfig

SETTLED = frozenset(
    {
        *("model", "host", "port", "redis", "threads"),  # by an option of its own
        *("worker_id", "cluster_token", "prefill_expected", "role_dir"),  # made up for each start
        *("port_file", "advertise", "metrics_port"),  # one value cannot serve several workers, or serves nobody here
    }
)
"""Fields that ``baton up`` fills in."""


@dataclass(frozen=True, slots=True)
class Option:
    """One option that is passed on."""

    name: str
    type: Any
    default: Any
    help: str
    owners: tuple[type[Any], ...]
    """The configurations that have it."""

    @property
    def group(self) -> str:
        """Heading in the help."""
        if len(self.owners) > 1:
            return "Gateway and workers"
        return "Gateway" if self.owners == (GatewayConfig,) else "Workers"


@dataclass(frozen=True, slots=True)
class PassedOn:
    """What the processes are given, by field. Raises ConfigError for what they would refuse."""

    gateway: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    workers: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        GatewayConfig(model="-", **self.gateway)
        WorkerConfig(model="-", **self.workers)


def passed_on_options() -> list[Option]:
    """Return all options that are passed on, in the order of their fields."""
    found: dict[str, Option] = {}
    for owner in (WorkerConfig, GatewayConfig):
        types, helps = get_type_hints(owner), _helps(owner)
        for field in dataclasses.fields(owner):
            if field.name in SETTLED:
                continue
            owners = (*(found[field.name].owners if field.name in found else ()), owner)
            found[field.name] = Option(field.name, types[field.name], field.default, helps[field.name], owners)
    return list(found.values())


def passed_on(values: Mapping[str, Any]) -> PassedOn:
    """Sort the values of :func:`passed_on_options` by who gets them; raises ConfigError."""
    parts: dict[type[Any], dict[str, Any]] = {GatewayConfig: {}, WorkerConfig: {}}
    for option in passed_on_options():
        for owner in option.owners:
            if option.name in values:
                parts[owner][option.name] = values[option.name]
    return PassedOn(parts[GatewayConfig], parts[WorkerConfig])


def _helps(owner: type[Any]) -> dict[str, str]:
    """Return the attribute docstrings of a configuration and its bases, each in one line."""
    found = [param for part in reversed(owner.__mro__[:-1]) for param in parse_from_object(part).params]
    return {param.arg_name: " ".join((param.description or "").split()) for param in found}

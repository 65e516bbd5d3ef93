"""What ``baton up`` starts: the command and environment of each process of the cluster."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from common.cli import to_argv, to_env, without_options
from common.messages import Role
from compose.child import ChildSpec
from compose.passed_on import PassedOn, passed_on_options
from compose.up_config import UpConfig
from gateway.config import GatewayConfig
from kvstore.host import role_file
from kvstore.host.config import WorkerConfig

STOP_MARGIN_S = 5.0
"""A process gets this long beyond its own limit for draining before it is killed."""

_SECRETS = frozenset({"redis", "cluster_token", "admin_key", "api_key"})
"""Fields that go by the environment: whoever may list processes sees their arguments."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
_WAITING = {"OMP_WAIT_POLICY": "passive"}
"""torch's threads sleep at a barrier instead of spinning on a core that another worker could use."""


@dataclass(frozen=True, slots=True)
class Site:
    """What is settled once for a start of the cluster."""

    model_dir: Path
    model_name: str
    """Name that clients use."""
    port: int
    """The HTTP port, never 0."""
    redis_url: str
    cluster_token: str
    log_dir: Path
    """Where the workers' roles are remembered too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes to start."""

    gateway: ChildSpec
    workers: tuple[ChildSpec, ...]


def plan_cluster(config: UpConfig, passed: PassedOn, site: Site, environ: Mapping[str, str]) -> Plan:
    """Return the processes of the cluster that ``config`` describes, with what is ``passed`` on to them."""
    env = base_env(environ)
    threads = config.threads or max(1, cores() // (config.prefill + config.decode))
    worker_env = _WAITING | env | dict.fromkeys(_THREAD_VARIABLES, str(threads))
    roles = [(Role.PREFILL, index) for index in range(config.prefill)]
    roles += [(Role.DECODE, index) for index in range(config.decode)]
    return Plan(
        gateway=_gateway(config, passed, site, env),
        workers=tuple(_worker(passed, site, role, index, threads, worker_env) for role, index in roles),
    )


def forget_roles(site: Site) -> None:
    """Let every worker of this start begin in the role of its name, whatever it did in an earlier one."""
    for path in site.log_dir.glob(f"*{role_file.SUFFIX}"):
        path.unlink()


def base_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that every child starts from: ours, without what spoke to ``baton up``."""
    names = [field.name for field in fields(UpConfig)] + [option.name for option in passed_on_options()]
    return without_options(environ, names) | {"PYTHONUNBUFFERED": "1"}


def client_model_name(source: str, model_dir: Path) -> str:
    """Return the name under which clients know the model that ``--model`` calls ``source``."""
    return model_dir.name if Path(source).expanduser().is_dir() else source


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gateway(config: UpConfig, passed: PassedOn, site: Site, env: Mapping[str, str]) -> ChildSpec:
    settled: dict[str, Any] = {
        "host": config.host,
        "port": site.port,
        "prefill_expected": config.prefill > 0,
    }
    options = GatewayConfig(**(dict(passed.gateway) | _common(passed.gateway, site) | settled))
    return _child("gateway", "gateway", options, env)


def _worker(passed: PassedOn, site: Site, role: Role, index: int, threads: int, env: Mapping[str, str]) -> ChildSpec:
    name = f"{role}-{index}"
    settled: dict[str, Any] = {
        "worker_id": name,
        "threads": threads,
        "role_dir": site.log_dir,
    }
    options = WorkerConfig(**(dict(passed.workers) | _common(passed.workers, site) | settled))
    return _child(name, f"{role}_worker", options, env)


def _common(passed: Mapping[str, Any], site: Site) -> dict[str, Any]:
    """Return what is settled for every process."""
    return {
        "model": str(site.model_dir),
        "served_model_name": passed.get("served_model_name") or site.model_name,
        "redis": site.redis_url,
        "cluster_token": site.cluster_token,
    }


def _child(name: str, package: str, options: GatewayConfig | WorkerConfig, env: Mapping[str, str]) -> ChildSpec:
    argv = _program(package, to_argv(options, secret=_SECRETS))
    return ChildSpec(name, argv, {**env, **to_env(options, _SECRETS)}, options.drain_seconds + STOP_MARGIN_S)


def _program(package: str, argv: list[str]) -> tuple[str, ...]:
    # -P: a folder of the same name where the user happens to stand must not be taken for ours
    return (sys.executable, "-P", "-m", package, *argv)

"""What ``baton up`` starts: the command and environment of each process of the cluster."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.cli import to_argv, variable, without_options
from common.messages import Role
from compose.child import ChildSpec
from compose.up_config import UpConfig
from gateway.config import GatewayConfig
from kvstore.host.config import WorkerConfig

STOP_MARGIN_S = 5.0
"""A process gets this long beyond its own limit for draining before it is killed."""

_SECRETS = frozenset({"redis", "cluster_token", "admin_key"})
_ROLE_SUFFIX = ".role"
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


def plan_cluster(config: UpConfig, site: Site, environ: Mapping[str, str]) -> Plan:
    """Return the processes of the cluster that ``config`` describes."""
    env = base_env(environ)
    secrets = {variable("redis"): site.redis_url, variable("cluster_token"): site.cluster_token}
    threads = config.threads or max(1, cores() // (config.prefill + config.decode))
    worker_env = _WAITING | env | secrets | dict.fromkeys(_THREAD_VARIABLES, str(threads))
    roles = [(Role.PREFILL, index) for index in range(config.prefill)]
    roles += [(Role.DECODE, index) for index in range(config.decode)]
    return Plan(
        gateway=_gateway(config, site, env | secrets),
        workers=tuple(_worker(config, site, role, index, threads, worker_env) for role, index in roles),
    )


def forget_roles(site: Site) -> None:
    """Let every worker of this start begin in the role of its name, whatever it did in an earlier one."""
    for role_file in site.log_dir.glob(f"*{_ROLE_SUFFIX}"):
        role_file.unlink()


def base_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment that every child starts from: ours, without the options of ``baton up`` itself."""
    return without_options(environ, UpConfig) | {"PYTHONUNBUFFERED": "1"}


def client_model_name(source: str, model_dir: Path) -> str:
    """Return the name under which clients know the model that ``--model`` calls ``source``."""
    return model_dir.name if Path(source).expanduser().is_dir() else source


def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _gateway(config: UpConfig, site: Site, env: Mapping[str, str]) -> ChildSpec:
    options = GatewayConfig(
        model=str(site.model_dir),
        served_model_name=site.model_name,
        host=config.host,
        port=site.port,
        redis=site.redis_url,
        cluster_token=site.cluster_token,
        prefill_expected=config.prefill > 0,
        local_prefill_tokens=config.local_prefill_tokens,
        pin_prefix=config.pin_prefix,
        planner=config.planner,
        planner_ttft_s=config.planner_ttft_s,
        planner_itl_s=config.planner_itl_s,
    )
    return ChildSpec(
        "gateway", _program("gateway", to_argv(options, secret=_SECRETS)), env, options.drain_seconds + STOP_MARGIN_S
    )


def _worker(config: UpConfig, site: Site, role: Role, index: int, threads: int, env: Mapping[str, str]) -> ChildSpec:
    options = WorkerConfig(
        model=str(site.model_dir),
        served_model_name=site.model_name,
        worker_id=f"{role}-{index}",
        redis=site.redis_url,
        cluster_token=site.cluster_token,
        dtype=config.dtype,
        device=config.device,
        block_size=config.block_size,
        kv_blocks=config.kv_blocks,
        kv_memory=config.kv_memory,
        max_model_len=config.max_model_len,
        transport=config.transport,
        tenant_cache_share=config.tenant_cache_share,
        threads=threads,
        role_file=site.log_dir / f"{role}-{index}{_ROLE_SUFFIX}",
    )
    argv = _program(f"{role}_worker", to_argv(options, secret=_SECRETS))
    return ChildSpec(options.worker_id, argv, env, options.drain_seconds + STOP_MARGIN_S)


def _program(package: str, argv: list[str]) -> tuple[str, ...]:
    # -P: a folder of the same name where the user happens to stand must not be taken for ours
    return (sys.executable, "-P", "-m", package, *argv)

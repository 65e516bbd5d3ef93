"""``baton drain WORKER``: let one worker of a running cluster end in order."""

import asyncio
from dataclasses import dataclass

from common.errors import ConfigError, Unavailable
from compose.console import note, result
from compose.gateway_client import accepted, open_gateway
from compose.readiness import error_message
from compose.status import fetch_cluster

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class DrainConfig:
    """Let one worker take nothing new, finish or hand over what it has, and exit; `baton up` starts it again."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway."""

    admin_key: str = ""
    """Key for admin calls, where the gateway asks for one."""

    api_key: str = ""
    """Key for looking at the cluster, where the gateway asks for one; of several the first."""

    timeout_s: float = 60.0
    """Seconds to wait for the worker's end."""


async def drain(worker: str, config: DrainConfig) -> None:
    """Drain ``worker`` and return when this life of it is gone.

    Raises ConfigError for an unknown worker, Unavailable when no gateway answers or the worker does not end in time.
    """
    epoch = await _begin(worker, config)
    note(f"{worker} is draining")
    try:
        async with asyncio.timeout(config.timeout_s):
            while await _is_there(worker, epoch, config):  # noqa: ASYNC110 - another process ends
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise Unavailable(f"{worker} has not ended within {config.timeout_s:g} s") from error
    result(f"{worker} has ended")


async def _begin(worker: str, config: DrainConfig) -> int:
    async with open_gateway(config.url, config.admin_key, timeout_s=10.0) as client:
        answer = await client.post("/v1/cluster/drain", json={"worker": worker})
    if answer.status_code == 404:
        raise ConfigError(error_message(answer))
    return int(accepted(answer).json()["epoch"])


async def _is_there(worker: str, epoch: int, config: DrainConfig) -> bool:
    cluster = await fetch_cluster(config.url, config.api_key)
    return any(one.id == worker and one.epoch == epoch for one in cluster.workers)

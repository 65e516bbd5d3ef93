"""A cluster on this machine with a real gateway, a real Redis and paced workers."""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.ratio.paced import Pace
from common.messages import Role
from compose.child import ChildSpec
from compose.embedded_redis import new_address, valkey_spec, wait_redis
from compose.first_of import first_of
from compose.keeper import Keeper
from compose.passed_on import PassedOn
from compose.plan import Site, base_env, plan_cluster
from compose.ports import free_port
from compose.readiness import wait_ready
from compose.supervisor import Supervisor
from compose.tune.profile import CostProfile, write_profile
from compose.up_config import UpConfig
from gateway.planner.ratio import Ratio
from tests.support import tiny_models

START_S = 120.0


@dataclass(frozen=True, slots=True)
class PacedCluster:
    """One that runs."""

    url: str
    folder: Path

    def paces(self) -> list[Pace]:
        """Return how well each worker kept its pace, once all have ended."""
        return [msgspec.json.decode(path.read_bytes(), type=Pace) for path in sorted(self.folder.glob("*.pace"))]


@asynccontextmanager
async def paced_cluster(
    ratio: Ratio, profile: CostProfile, folder: Path, **options: Any
) -> AsyncIterator[PacedCluster]:
    """Start workers of ``profile`` in ``ratio`` and a gateway with these ``options``, and end all in order.

    Raises BatonError when it cannot be started, TimeoutError when it does not become ready.
    """
    await asyncio.to_thread(_prepare, folder, profile)
    address = new_address(free_port("127.0.0.1"))
    config = UpConfig(prefill=ratio.prefill, decode=ratio.decode, threads=1)
    passed = PassedOn(options, {"kv_blocks": profile.kv_blocks})
    port = free_port(config.host)
    site = Site(folder / "model", "tiny", port, address.url, secrets.token_hex(16), folder)
    plan = plan_cluster(config, passed, site, os.environ)
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(folder, group)
        redis = [supervisor.start(valkey_spec(address, base_env(os.environ)))]
        gateway: list[Keeper] = []
        workers: list[Keeper] = []
        try:
            async with asyncio.timeout(START_S):
                await wait_redis(address.url)
                gateway.append(supervisor.start(plan.gateway))
                workers += [supervisor.start(_paced(spec, folder)) for spec in plan.workers]
                url = f"http://{config.host}:{port}"
                await first_of(wait_ready(url, lambda missing: None), supervisor.wait_given_up())
            supervisor.mark_ready()
            yield PacedCluster(url, folder)
        finally:
            await supervisor.stop(gateway, workers, redis)


def _prepare(folder: Path, profile: CostProfile) -> None:
    folder.mkdir(parents=True)
    tiny_models.build("llama", folder / "model")
    write_profile(profile, folder / "profile.json")


def _paced(spec: ChildSpec, folder: Path) -> ChildSpec:
    """Return ``spec`` with the paced worker in place of the worker's own program."""
    roles = {f"{role}_worker": role for role in Role}
    at, role = next((at, roles[word]) for at, word in enumerate(spec.argv) if word in roles)
    program = ("benchmarks.ratio.paced", role, str(folder / "profile.json"), str(folder / f"{spec.name}.pace"))
    return replace(spec, argv=(*spec.argv[:at], *program, *spec.argv[at + 1 :]))

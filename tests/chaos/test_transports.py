"""Workers whose memory others read are killed and frozen while they are read: no wrong token, and nothing held."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.chaos.cluster import LEASE_S, ChaosCluster, chaos_cluster, key_of, new_key
from tests.chaos.test_matrix import Prompts, all_done, check, prompts, start

__all__ = ["prompts"]

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(420)]

TRANSPORTS = [
    "shm",
    pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="the package nixl is not there")),
]


@pytest.fixture(params=TRANSPORTS, scope="module")
async def lending(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[str, ChaosCluster]]:
    """A cluster whose workers read each other's memory, and how."""
    folder = tmp_path_factory.mktemp(f"logs-{request.param}")
    async with chaos_cluster(model, folder, transport=request.param) as running:
        yield request.param, running


@pytest.mark.parametrize("target", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP", "SIGTERM"])
async def test_a_fault_among_readers_changes_no_token(
    lending: tuple[str, ChaosCluster], prompts: Prompts, fault: str, target: str
) -> None:
    transport, cluster = lending
    num_starts = cluster.nodes[target].process.num_starts
    tasks = await start(cluster, prompts, new_key())
    async with asyncio.timeout(LEASE_S * 10):
        while not any(task.done() for task in tasks):
            if "pulling" in [stage for one in (await cluster.stages()).values() for stage in one]:
                break
            await asyncio.sleep(0.005)
    cluster.send(target, signal.Signals[fault])
    try:
        await all_done(tasks)
    finally:
        cluster.heal()
    check([await task for task in tasks], prompts, [])
    if fault != "SIGSTOP":
        await cluster.wait_restarted(target, num_starts)
    await cluster.wait_ready()
    await cluster.wait_idle()
    check(await asyncio.gather(*await start(cluster, prompts, new_key())), prompts, [])
    assert await bytes_read(cluster, transport) > 0
    await cluster.wait_idle()


async def bytes_read(cluster: ChaosCluster, transport: str) -> float:
    """Return what the present lives of all workers have read by ``transport``."""
    url = f"http://127.0.0.1:{cluster.nodes['gateway-0'].port}/metrics"
    shown = (await cluster.client.get(url, headers={"Authorization": f"Bearer {key_of(0)}"})).text
    return sum(map(float, re.findall(rf"baton_worker_pull_bytes_by_{transport}_total{{[^}}]*}} (\S+)", shown)))

"""The health check of containers."""

import sys

import anyio
import pytest

from kvstore.host.metrics import HostMetrics
from kvstore.host.watch import WatchServer

pytestmark = pytest.mark.anyio


async def probe(url: str) -> int:
    """Return the exit status of a probe, as a container engine runs it."""
    return (await anyio.run_process([sys.executable, "-m", "common.probe", url], check=False)).returncode


async def test_only_a_200_is_fine() -> None:
    server = WatchServer(HostMetrics().registry, lambda: "loading")
    port = await server.start("127.0.0.1", 0)
    try:
        assert await probe(f"http://127.0.0.1:{port}/health") == 0
        assert await probe(f"http://127.0.0.1:{port}/ready") == 1
        assert await probe(f"http://127.0.0.1:{port}/nowhere") == 1
    finally:
        server.stop()
    assert await probe(f"http://127.0.0.1:{port}/health") == 1

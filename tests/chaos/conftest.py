"""One event loop and one cluster for all tests here; its processes are looked for when it ends."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.cluster import ChaosCluster, chaos_cluster
from tests.integration.conftest import one_event_loop
from tests.support.tiny_models import build

__all__ = ["one_event_loop"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    directory = tmp_path_factory.mktemp("llama")
    build("llama", directory)
    return directory


@pytest.fixture(scope="session")
async def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosCluster]:
    """A cluster that every test leaves whole and idle."""
    async with chaos_cluster(model, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(autouse=True)
def no_child_left() -> None:
    """The cluster's processes come and go; :func:`tests.chaos.cluster.chaos_cluster` ends them all."""

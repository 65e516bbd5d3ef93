"""A cluster of real processes with the real small model, shared by the tests that leave it as they find it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from compose import smollm2
from tests.support.cluster import Cluster, running_cluster

POOL = ("--kv-memory", "256MiB", "--max-model-len", "4096", "--threads", "1")
"""About 5,800 tokens of SmolLM2 in float32 a worker, and no thread that waits for another on a busy machine."""


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """Folder of SmolLM2-135M-Instruct; fetched on a first run."""
    return smollm2.prepare()


@pytest.fixture(scope="session")
def cluster(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill and one decode worker. A test that ends or freezes a process starts a cluster of its own."""
    with running_cluster(tmp_path_factory.mktemp("cluster"), *POOL) as running:
        yield running


@pytest.fixture
def own_cluster(request: pytest.FixtureRequest, model_dir: Path, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster for one test, which may do to it what it likes; parametrise it indirectly with further options."""
    with running_cluster(tmp_path / "own", *POOL, *getattr(request, "param", ())) as running:
        yield running

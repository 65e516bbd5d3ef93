"""Fixtures for tests with real gRPC and a real Redis in this process."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from common.redis_client import connect
from tests.conftest import RedisServer
from tests.support.reference import Reference
from tests.support.tiny_models import build


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama."""
    directory = tmp_path_factory.mktemp("llama")
    build("llama", directory)
    return directory


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    """What transformers itself makes of it."""
    return Reference(model)


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of an empty Redis."""
    return redis_server.url


@pytest.fixture(params=["off", "on"])
def scheduling(request: pytest.FixtureRequest) -> str:
    """Whether decode steps are launched ahead: ``--async-scheduling``."""
    return str(request.param)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty Redis, made as the processes make theirs."""
    async with connect(redis_url) as client:
        yield client


@pytest.fixture(scope="session", autouse=True)
async def one_event_loop(anyio_backend: object) -> AsyncIterator[None]:
    """Keep the loop of the first test open until the last has ended.

    gRPC's threads wake the loop that a call was made on, at times after the call has ended. A loop for each test
    would be closed by then; a process has one loop for its life, and so have these tests.
    """
    yield  # noqa: PT022 - only a generator keeps the loop until the session ends

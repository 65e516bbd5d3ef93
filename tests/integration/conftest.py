"""Fixtures for tests with real gRPC and a real Redis in this process."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from tests.conftest import RedisServer


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    """URL of an empty Redis."""
    return redis_server.url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty Redis."""
    async with Redis.from_url(redis_url) as client:
        yield client

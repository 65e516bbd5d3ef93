"""A bench for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from common.redis_client import connect
from tests.support.gateway_bench import Bench, open_bench


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty Redis, made as the processes make theirs."""
    async with connect(redis_url) as client:
        yield client


@pytest.fixture
async def bench(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    """A place for a gateway and stub workers."""
    async with open_bench(redis, redis_url, tmp_path) as opened:
        yield opened

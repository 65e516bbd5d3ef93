"""A bench for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.support.gateway_bench import Bench, open_bench


@pytest.fixture
async def bench(redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    """A place for a gateway and stub workers."""
    async with open_bench(redis, redis_url, tmp_path) as opened:
        yield opened

"""How Baton talks to Redis: connections that fail fast and can be cancelled.

``socket_timeout`` stays off: with it redis-py 8 writes inside ``asyncio.wait_for``, which on Python 3.11 can lose a
cancellation, and a task that misses its cancellation hangs the shutdown. Callers bound their waits with :func:`calling`
instead; what they catch is :data:`RedisUnavailable`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from common.errors import ConfigError

CALL_TIMEOUT_S = 2.0
"""A call that takes longer than this counts as failed."""

CONNECT_TIMEOUT_S = 1.0

RedisUnavailable = (RedisError, OSError)
"""What a call raises when Redis is away, slow (TimeoutError is an OSError) or refuses writes."""


def connect(url: str) -> Redis:
    """Return a client of the server at ``url``; it connects when it is first used, and again after a failure.

    Raises ConfigError when ``url`` is not the URL of a Redis server.
    """
    try:
        return Redis.from_url(
            url, socket_timeout=None, socket_connect_timeout=CONNECT_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
    except ValueError as error:
        raise ConfigError(f"--redis must be the URL of a Redis server: {error}") from error


@asynccontextmanager
async def calling(redis: Redis, timeout_s: float = CALL_TIMEOUT_S) -> AsyncIterator[None]:
    """Bound the calls inside in time, and turn an answer that makes no sense into a RedisError.

    Such an answer was damaged on its way or belongs to another call, so the connections are not used again.
    """
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        await redis.connection_pool.disconnect()
        raise TimeoutError(f"Redis has not answered for {timeout_s:g} s") from None
    except RedisUnavailable as error:
        if not isinstance(error, ResponseError):
            await redis.connection_pool.disconnect()
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        await redis.connection_pool.disconnect()
        raise RedisError(f"Redis gave an answer that cannot be read: {error}") from error

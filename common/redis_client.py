"""How Baton talks to Redis: connections that fail fast and can be cancelled.

``socket_timeout`` stays off: with it redis-py 8 writes inside ``asyncio.wait_for``, which on Python 3.11 can lose a
cancellation, and a task that misses its cancellation hangs the shutdown. Callers bound their waits with
``asyncio.timeout(CALL_TIMEOUT_S)`` instead; what they catch is :data:`RedisUnavailable`.
"""

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

CALL_TIMEOUT_S = 2.0
"""A call that takes longer than this counts as failed."""

CONNECT_TIMEOUT_S = 1.0

RedisUnavailable = (RedisError, OSError)
"""What a call raises when Redis is away, slow (TimeoutError is an OSError) or refuses writes."""


def connect(url: str) -> Redis:
    """Return a client of the server at ``url``; it connects when it is first used, and again after a failure."""
    return Redis.from_url(
        url, socket_timeout=None, socket_connect_timeout=CONNECT_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
    )

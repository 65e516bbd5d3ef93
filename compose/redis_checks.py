"""Checks of Redis: version, latency, eviction, memory, and its clock against this machine's."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from statistics import median
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from common.errors import ConfigError
from common.redis_client import RedisUnavailable, calling, connect
from compose.finding import Finding, failed, ok, skipped, warning

MIN_VERSION = (7, 2)
MAX_PING_MS = 5.0
MAX_SKEW_S = 2.0
MAX_MEMORY_SHARE = 0.8

_NUM_PINGS = 20


async def check_redis(url: str) -> AsyncIterator[Finding]:
    """Yield what there is to say about the Redis at ``url``."""
    if not url:
        yield skipped("redis", "not looked at; name it with --redis (an embedded one is for its own cluster only)")
        return
    try:
        async with connect(url) as redis:
            for finding in await _look(redis):
                yield finding
    except ConfigError as error:
        yield failed("redis", error.message, "write it as redis://HOST:PORT or redis://:PASSWORD@HOST:PORT")
    except RedisUnavailable as error:
        yield failed("redis", f"does not answer: {error}", "start it, or correct --redis; is a firewall between?")


async def _look(redis: Redis) -> list[Finding]:
    pings_ms: list[float] = []
    async with calling(redis, 10.0):
        info: Mapping[str, Any] = await redis.info()
        for _ in range(_NUM_PINGS):
            began = time.perf_counter()
            await redis.ping()
            pings_ms.append((time.perf_counter() - began) * 1000)
        seconds, microseconds = await redis.time()
        skew_s = seconds + microseconds / 1e6 - time.time_ns() / 1e9
    return [
        check_version(str(info.get("redis_version", ""))),
        check_latency(pings_ms),
        check_eviction(await _policy(redis)),
        check_memory(int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))),
        check_clock(skew_s),
    ]


async def _policy(redis: Redis) -> str:
    """Return the eviction policy; empty where the server does not tell."""
    try:
        async with calling(redis):
            return str((await redis.config_get("maxmemory-policy")).get("maxmemory-policy", ""))
    except ResponseError:
        return ""


def check_version(version: str) -> Finding:
    """Say whether the server knows the commands that Baton uses."""
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers >= MIN_VERSION:
        return ok("redis version", version)
    return warning("redis version", f"{version or 'unknown'}; Baton is made for 7.2 and newer", "upgrade Redis")


def check_latency(pings_ms: Sequence[float]) -> Finding:
    """Say whether Redis is near enough: every remote prefill waits for it about three times."""
    what = f"ping {median(pings_ms):.2f} ms, slowest {max(pings_ms):.2f} ms"
    if median(pings_ms) <= MAX_PING_MS:
        return ok("redis latency", what)
    return warning(
        "redis latency", what, "run Redis near the workers; look for swapping and slow commands (SLOWLOG GET)"
    )


def check_eviction(policy: str) -> Finding:
    """Say whether Redis refuses when it is full; one that evicts loses queued prompts."""
    if not policy:
        return warning("redis eviction", "the server does not tell its policy", "make sure that it is noeviction")
    if policy == "noeviction":
        return ok("redis eviction", policy)
    return failed(
        "redis eviction", f"{policy}: a full Redis would drop queues", "CONFIG SET maxmemory-policy noeviction"
    )


def check_memory(used: int, limit: int) -> Finding:
    """Say whether there is room left; 0 is no limit."""
    what = f"{used / 2**20:.1f} MiB used of {f'{limit / 2**20:.0f} MiB' if limit else 'any amount'}"
    if not limit or used <= limit * MAX_MEMORY_SHARE:
        return ok("redis memory", what)
    return warning("redis memory", what, "raise maxmemory; Baton itself takes a few megabytes")


def check_clock(skew_s: float) -> Finding:
    """Say whether this clock and Redis's agree; Baton does not depend on it, but logs are compared by it."""
    if abs(skew_s) <= MAX_SKEW_S:
        return ok("clocks", f"Redis's and this machine's differ by {abs(skew_s) * 1000:.0f} ms")
    return warning("clocks", f"Redis's and this machine's differ by {abs(skew_s):.1f} s", "run an NTP client on both")

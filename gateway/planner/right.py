"""The right to change roles: one holder in the cluster at a time, kept in Redis with a time to live.

With the right comes a number, higher than any before, also after a flush of Redis. Workers refuse an order under a
lower number than they have seen, so a holder that lost the right while it was frozen changes nothing any more. The
planner that has the right keeps it; an operator's order takes it over, and only from a planner.
"""

import secrets

from redis.asyncio import Redis

from common.redis_client import calling

TTL_S = 5.0
"""Not renewed for this long, the right is free."""

_RIGHT = "baton:roles:right"
_NUMBER = "baton:roles:number"
_PLANNER = "planner:"
_OPERATOR = "operator:"

_ACQUIRE = """
local holder = redis.call('GET', KEYS[1])
local may_take = ARGV[3] == '1' and holder and string.sub(holder, 1, #ARGV[4]) == ARGV[4]
if holder and not may_take then return 0 end
local now = redis.call('TIME')
local number = math.max(now[1] * 1000000 + now[2], (tonumber(redis.call('GET', KEYS[2]) or '0')) + 1)
redis.call('SET', KEYS[2], string.format('%.0f', number))
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return number
"""
_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class RoleRight:
    """One claim to the right. Every call raises one of RedisUnavailable when Redis does not do its part."""

    def __init__(self, redis: Redis, *, is_planner: bool) -> None:
        self._redis = redis
        self._is_planner = is_planner
        self._name = f"{_PLANNER if is_planner else _OPERATOR}{secrets.token_hex(8)}"

    async def acquire(self) -> int | None:
        """Return the number that comes with the right, None while somebody else has it."""
        takes_over = "0" if self._is_planner else "1"
        async with calling(self._redis):
            number = await self._redis.eval(
                _ACQUIRE, 2, _RIGHT, _NUMBER, self._name, str(int(TTL_S * 1000)), takes_over, _PLANNER
            )
        return int(number) or None

    async def renew(self) -> bool:
        """Keep the right for another ``TTL_S``; False when it is lost."""
        async with calling(self._redis):
            return bool(await self._redis.eval(_RENEW, 1, _RIGHT, self._name, str(int(TTL_S * 1000))))

    async def release(self) -> None:
        """Give the right back, if it is still held."""
        async with calling(self._redis):
            await self._redis.eval(_RELEASE, 1, _RIGHT, self._name)

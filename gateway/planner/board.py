"""What all gateways share about the planner, in Redis: its last decisions, the threshold, and the ratio to go home to.

Written by the gateway that plans, read by all. Gone after a flush, it is written anew. Every function raises one of
RedisUnavailable when Redis does not do its part.
"""

from typing import Any

from redis.asyncio import Redis

from common.errors import InvalidRequest
from common.messages import PlannerState
from common.redis_client import calling
from common.wire import decode_sealed, encode_sealed
from gateway.planner.ratio import Ratio, parse_ratio

STATE_TTL_S = 30.0
"""A threshold that nobody plans any more holds for so long."""

STATE_KEY = "baton:planner:state"
_HOME = "baton:planner:home"


class PlannerBoard:
    """The shared state of one cluster's planner."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def publish(self, state: PlannerState) -> None:
        """Show ``state`` to all gateways."""
        async with calling(self._redis):
            await self._redis.set(STATE_KEY, encode_sealed(state), px=int(STATE_TTL_S * 1000))

    async def state(self) -> PlannerState | None:
        """Return what was published last; None when nobody plans."""
        async with calling(self._redis):
            data: Any = await self._redis.get(STATE_KEY)
        try:
            return None if data is None else decode_sealed(data, PlannerState)
        except InvalidRequest:
            return None

    async def set_home(self, ratio: Ratio) -> None:
        """Let an idle cluster return to ``ratio``, as an operator has set it."""
        async with calling(self._redis):
            await self._redis.set(_HOME, str(ratio))

    async def home(self) -> Ratio | None:
        """Return the ratio that an operator has set; None when none has."""
        async with calling(self._redis):
            text: Any = await self._redis.get(_HOME)
        try:
            return None if text is None else parse_ratio(text.decode())
        except (InvalidRequest, UnicodeDecodeError):
            return None

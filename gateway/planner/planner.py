"""Decides how to meet the load: who reads short prompts, and how many workers have which role. Pure.

A pool that is hot (:mod:`gateway.planner.trend`) is helped, and a warm one already when the other has little to do,
since a change takes seconds, long answers stay where they are and an overload outlasts its cause. The cheap valve comes
first: prompts up to a threshold are read where they are answered, so raising it relieves the prefill workers and
lowering it the decode workers, at once and for free. Prompts of one length move all at once, so it is raised only if
the decode workers could take all of them. Only when the valve is used up, one worker changes its role, and only if
those that it leaves would stay below ``ROOM`` without it. After a change there is a pause, in proportion to what the
change took, and turning back takes a longer one; where a pool is hot and the other has little to do, the least pause is
enough. Nothing is decided while a change is under way or something cannot be known. An idle cluster goes home, to the
ratio and threshold that it was given.

Rules after Dynamo's planner (a change only if the donor can spare it, holds and floors); the order valve-then-worker is
ours.
"""

import enum
import math
from dataclasses import dataclass

from common.messages import Role
from gateway.planner.pressure import Pressure
from gateway.planner.ratio import Ratio
from gateway.planner.trend import Trend

LIGHT = 0.45
"""A warm pool is helped too, by one that would stay below this."""

SPARE = 0.2
"""A donor that would stay below this loses nothing: it may help a warm pool although that turns a change back."""

ROOM = 0.7
"""A donor must stay below this after the change; the gap to HOT is the hysteresis."""

SETTLE_S = 3.0
"""Pause after the threshold has moved."""

MIN_COOL_DOWN_S = 5.0
COOL_DOWN_FACTOR = 3.0
"""Pause after a worker has changed: so many times what the change took, and at least MIN_COOL_DOWN_S. After that least
pause a pool that is hot is helped by one that would be LIGHT."""

REGRET_S, BACKOFF_S = 60.0, 300.0
"""A threshold that had to be lowered within REGRET_S of being raised is not raised again for BACKOFF_S."""

REVERSAL_FACTOR = 4.0
"""A change that undoes the last one waits for so many pauses, with the same exception."""

IDLE_S = 60.0
"""A cluster without work for this long goes home."""

LOCAL_FACTOR = 16
"""The raised threshold is so many times the one that was given."""

MIN_RAISED_TOKENS = 1024


class Action(enum.StrEnum):
    """What is to be done."""

    HOLD = "hold"
    LOCAL_TOKENS = "local_tokens"  # move the local-prefill threshold
    TO_PREFILL = "to_prefill"  # one decode worker becomes a prefill worker
    TO_DECODE = "to_decode"  # one prefill worker becomes a decode worker


class Reason(enum.StrEnum):
    """Why."""

    MISSING_METRICS = "missing_metrics"
    CHANGE_IN_FLIGHT = "change_in_flight"
    COOL_DOWN = "cool_down"
    BALANCED = "balanced"  # no pool is hot
    BOTH_HOT = "both_hot"  # there is nobody to take from
    PREFILL_HOT = "prefill_hot"
    PREFILL_WARM = "prefill_warm"  # and the decode workers have next to nothing to do
    DECODE_HOT = "decode_hot"
    DECODE_WARM = "decode_warm"  # and the prefill workers have next to nothing to do
    LAST_OF_ITS_ROLE = "last_of_its_role"  # the donor pool has one worker
    DONOR_TOO_BUSY = "donor_too_busy"  # those that stay would be hot themselves
    IDLE = "idle"  # nothing to do for a while: go home


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do, why, and what it was decided from."""

    action: Action
    reason: Reason
    seen: Pressure
    prefill: float
    """Smoothed."""
    decode: float
    """Smoothed."""
    donor_after: float = 0.0
    """Predicted pressure of the donor pool after the change; 0 where none was considered."""
    local_prefill_tokens: int = 0
    """The threshold from now on."""

    @property
    def role(self) -> Role | None:
        """The role that one worker is to take, if any."""
        return {Action.TO_PREFILL: Role.PREFILL, Action.TO_DECODE: Role.DECODE}.get(self.action)


class Planner:
    """Owns the smoothed pressures and the memory of its own changes. Times are seconds of one clock, passed in."""

    def __init__(self, local_prefill_tokens: int) -> None:
        self.home: Ratio | None = None
        """The ratio that an idle cluster returns to; the first that is seen, unless somebody sets it."""
        self.local_prefill_tokens = local_prefill_tokens
        self._home_tokens = local_prefill_tokens
        self._rungs = sorted({0, local_prefill_tokens, max(MIN_RAISED_TOKENS, LOCAL_FACTOR * local_prefill_tokens)})
        self._trend = Trend()
        self._idle_since: float | None = None
        self._in_flight: Role | None = None
        self._raised_at = self._no_raise_until = -math.inf
        self._paused_until = self._settled_at = -math.inf
        self._last_role: Role | None = None
        self._changed_at = -math.inf
        self._pause_s = 0.0

    # ---- what is told ----

    def begun(self, decision: Decision, now: float) -> None:
        """``decision`` is being carried out."""
        if decision.action is Action.LOCAL_TOKENS:
            self._moved_threshold(decision.local_prefill_tokens, now)
            self._pause(now, SETTLE_S)
        else:
            self._in_flight = decision.role

    def ended(self, now: float, took_s: float, *, well: bool) -> None:
        """The change of a worker's role that was begun has ended, ``well`` or with a failure."""
        if well:
            self._last_role = self._in_flight
        self._in_flight = None
        self._changed_at = now
        self._pause_s = max(MIN_COOL_DOWN_S, COOL_DOWN_FACTOR * took_s)
        self._settled_at = now + self._pause_s
        self._pause(now, MIN_COOL_DOWN_S)

    def forget(self, now: float) -> None:
        """Somebody else has changed the cluster: what was seen before says nothing any more."""
        self._in_flight = None
        self._trend.forget()
        self._pause(now, MIN_COOL_DOWN_S)

    # ---- what is decided ----

    def decide(self, seen: Pressure, now: float) -> Decision:
        """Return what to do after a look at ``now``."""
        if seen.missing:
            self._trend.forget()
            self._idle_since = None
            return self._say(Action.HOLD, Reason.MISSING_METRICS, seen)
        self.home = self.home or (seen.ratio if seen.is_settled else None)
        self._trend.look(seen, now)
        if self._in_flight is not None or not seen.is_settled:
            self._trend.cool()
            return self._say(Action.HOLD, Reason.CHANGE_IN_FLIGHT, seen)
        is_hot = any(self._trend.is_hot(role) for role in Role)
        if now < self._paused_until or (now < self._settled_at and not is_hot):
            return self._say(Action.HOLD, Reason.COOL_DOWN, seen)
        if self._is_idle(seen, now):
            return self._go_home(seen)
        return self._meet_load(seen, now)

    def _meet_load(self, seen: Pressure, now: float) -> Decision:
        hot = {role: self._trend.is_hot(role) for role in Role}
        if all(hot.values()):
            return self._say(Action.HOLD, Reason.BOTH_HOT, seen)
        for role, reason in ((Role.PREFILL, Reason.PREFILL_HOT), (Role.DECODE, Reason.DECODE_HOT)):
            if hot[role]:
                return self._relieve(role, reason, ROOM, seen, now)
        for role, reason in ((Role.PREFILL, Reason.PREFILL_WARM), (Role.DECODE, Reason.DECODE_WARM)):
            if self._trend.is_warm(role):
                decision = self._relieve(role, reason, LIGHT, seen, now)
                if decision.action is not Action.HOLD:
                    return decision
        return self._say(Action.HOLD, Reason.BALANCED, seen)

    def _relieve(self, pool: Role, reason: Reason, room: float, seen: Pressure, now: float) -> Decision:
        """Take load off ``pool``: by the threshold if it can move, else by a worker of the other pool, which must stay
        below ``room``."""
        tokens = self._next_tokens(up=pool is Role.PREFILL)
        if tokens is not None and self._helper_after(pool, seen) < room:
            if pool is Role.DECODE or now >= self._no_raise_until:
                return self._say(Action.LOCAL_TOKENS, reason, seen, tokens=tokens)
        num_donors = seen.ratio.decode if pool is Role.PREFILL else seen.ratio.prefill
        if num_donors <= 1:
            return self._say(Action.HOLD, Reason.LAST_OF_ITS_ROLE, seen)
        after = self._donor_after(pool, seen, num_donors)
        if after >= room:
            return self._say(Action.HOLD, Reason.DONOR_TOO_BUSY, seen, donor_after=after)
        is_plain = after < (LIGHT if room == ROOM else SPARE)
        if not is_plain and (now < self._settled_at or self._turns_back(pool, now)):
            return self._say(Action.HOLD, Reason.COOL_DOWN, seen, donor_after=after)
        action = Action.TO_PREFILL if pool is Role.PREFILL else Action.TO_DECODE
        return self._say(action, reason, seen, donor_after=after)

    def _turns_back(self, pool: Role, now: float) -> bool:
        """Whether a worker for ``pool`` would undo a change that is not long ago."""
        is_reversal = self._last_role is not None and self._last_role is not pool
        return is_reversal and now - self._changed_at < REVERSAL_FACTOR * self._pause_s

    def _helper_after(self, pool: Role, seen: Pressure) -> float:
        """Predict the pressure of the other pool after the threshold has moved in favour of ``pool``.

        At worst the decode workers read everything that the prefill workers read now.
        """
        if pool is Role.DECODE:
            return max(self._trend.prefill, seen.prefill_busy)
        return self._trend.decode + seen.prefill_busy * seen.ratio.prefill / max(1, seen.ratio.decode)

    def _donor_after(self, pool: Role, seen: Pressure, num_donors: int) -> float:
        """Predict the pressure of the donor pool with one worker less; ``pool`` is who gets it."""
        growth = num_donors / (num_donors - 1)
        if pool is Role.DECODE:
            return max(self._trend.prefill, seen.prefill_busy) * growth
        return max(seen.kv_use * growth, seen.admission * growth, self._trend.itl_after(growth))

    def _go_home(self, seen: Pressure) -> Decision:
        if self.local_prefill_tokens != self._home_tokens:
            return self._say(Action.LOCAL_TOKENS, Reason.IDLE, seen, tokens=self._home_tokens)
        if self.home is None or self.home.total != seen.ratio.total or self.home == seen.ratio:
            return self._say(Action.HOLD, Reason.IDLE, seen)
        action = Action.TO_PREFILL if seen.ratio.prefill < self.home.prefill else Action.TO_DECODE
        num_donors = seen.ratio.decode if action is Action.TO_PREFILL else seen.ratio.prefill
        if num_donors <= 1:  # home is a cluster without prefill workers
            return self._say(Action.HOLD, Reason.LAST_OF_ITS_ROLE, seen)
        return self._say(action, Reason.IDLE, seen)

    def _say(
        self, action: Action, reason: Reason, seen: Pressure, *, tokens: int | None = None, donor_after: float = 0.0
    ) -> Decision:
        local = self.local_prefill_tokens if tokens is None else tokens
        return Decision(action, reason, seen, self._trend.prefill, self._trend.decode, donor_after, local)

    # ---- what is remembered ----

    def _is_idle(self, seen: Pressure, now: float) -> bool:
        if seen.num_sequences:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        return self._idle_since is not None and now - self._idle_since >= IDLE_S

    def _next_tokens(self, *, up: bool) -> int | None:
        beyond = [rung for rung in self._rungs if (rung > self.local_prefill_tokens) is up]
        beyond = [rung for rung in beyond if rung != self.local_prefill_tokens]
        return (min(beyond) if up else max(beyond)) if beyond else None

    def _moved_threshold(self, tokens: int, now: float) -> None:
        if tokens > self.local_prefill_tokens:
            self._raised_at = now
        elif now - self._raised_at < REGRET_S:
            self._no_raise_until = now + BACKOFF_S
        self.local_prefill_tokens = tokens

    def _pause(self, now: float, seconds: float) -> None:
        self._paused_until = max(self._paused_until, now + seconds)
        self._trend.cool()

"""Where the pressures are going, from one look to the next: peaks, means, and for how long a pool is pressed. Pure."""

import math
from dataclasses import dataclass

from common.messages import Role
from gateway.planner.pressure import Pressure

HOT = 0.8
"""A pool whose peaks are above this is about to miss its target."""

WARM = 0.5
"""A pool whose mean is above this may miss it soon."""

LOOKS = 3
"""A pool is hot, or warm, when it was so for so many looks in a row."""

RISE_S, FALL_S = 2.0, 10.0
"""Time constants along the peaks: queues come in bursts, and it is their peaks that miss a target."""

MEAN_S = 5.0
"""Time constant of the means: one burst is no load."""

MOST = 10.0
"""No pressure is predicted to be higher; a pool that cannot do its work at all is at it."""


@dataclass(slots=True)
class _Pool:
    """One pool's pressure: along its peaks, its mean, and for how many looks in a row it was above the marks."""

    peaks: float = 0.0
    mean: float = 0.0
    num_hot: int = 0
    num_warm: int = 0

    def look(self, pressure: float, elapsed_s: float) -> None:
        self.peaks = _towards(self.peaks, pressure, elapsed_s, RISE_S if pressure > self.peaks else FALL_S)
        self.mean = _towards(self.mean, pressure, elapsed_s, MEAN_S)
        self.num_hot = self.num_hot + 1 if self.peaks > HOT else 0
        self.num_warm = self.num_warm + 1 if self.mean > WARM else 0


class Trend:
    """Owned by the planner. Times are seconds of one clock, passed in."""

    def __init__(self) -> None:
        self._looked_at: float | None = None
        self._pools = {role: _Pool() for role in Role}
        self._mean_itl = 0.0
        self._itl_floor = math.inf

    @property
    def prefill(self) -> float:
        """Pressure of the prefill pool along its peaks."""
        return self._pools[Role.PREFILL].peaks

    @property
    def decode(self) -> float:
        """Pressure of the decode pool along its peaks."""
        return self._pools[Role.DECODE].peaks

    def is_hot(self, role: Role) -> bool:
        """Whether the pool of ``role`` is about to miss its target."""
        return self._pools[role].num_hot >= LOOKS

    def is_warm(self, role: Role) -> bool:
        """Whether it may miss it soon."""
        return self._pools[role].num_warm >= LOOKS

    def look(self, seen: Pressure, now: float) -> None:
        """Take in what was seen at ``now``."""
        elapsed_s = math.inf if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        self._pools[Role.PREFILL].look(seen.prefill, elapsed_s)
        self._pools[Role.DECODE].look(seen.decode, elapsed_s)
        mean_itl = seen.itl if seen.mean_itl is None else seen.mean_itl
        self._mean_itl = _towards(self._mean_itl, mean_itl, elapsed_s, MEAN_S)
        if mean_itl:
            self._itl_floor = min(self._itl_floor, mean_itl)

    def cool(self) -> None:
        """Forget for how long the pools have been pressed."""
        for pool in self._pools.values():
            pool.num_hot = pool.num_warm = 0

    def forget(self) -> None:
        """Let the next look be the first: what was seen before says nothing any more."""
        self._looked_at = None
        self.cool()

    def itl_after(self, growth: float) -> float:
        """Predict the time between tokens, over its target, when each decode worker writes ``growth`` times as many.

        A step takes ``floor + c·S`` with S sequences, and S sequences write ``S / step`` tokens a second: the worker
        is ``u = 1 - floor / step`` of the way to the most that it can write, and a step takes ``floor / (1 - u)``.
        """
        floor = min(self._itl_floor, self._mean_itl)
        use = growth * (1 - floor / self._mean_itl) if self._mean_itl else 0.0
        return floor / (1 - use) if floor < (1 - use) * MOST else MOST


def _towards(value: float, newest: float, elapsed_s: float, constant_s: float) -> float:
    return value + (1 - math.exp(-elapsed_s / constant_s)) * (newest - value)

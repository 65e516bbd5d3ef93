"""Measures a step loop: how fast it computes prompt tokens, how far apart tokens come, how busy it is, if it turns."""

import math

_HALF_WEIGHT_TOKENS = 512
"""A step of this many prompt tokens weighs as much as everything before it; a few tokens, whose step is bound by other
things than their number, weigh next to nothing."""

_MIN_TOKENS = 32
"""Steps of fewer prompt tokens say nothing about their rate."""

_PATIENCE = 4.0
"""A step may take this many times what its tokens take at the measured rate: with a long context before them, or beside
other work on the machine, they take longer."""

_ASSUMED_TOKENS_PER_S = 40.0
"""Rate that a step is held to before one was measured: slow, since models may be large and first steps compile."""

_BUSY_S = 5.0
"""What was longer ago than this counts little for how busy the loop is."""

_ITL_WEIGHT = 0.1
"""Weight of the newest gap between tokens in their moving mean."""


class StepMeter:
    """Watches one step loop. Times are monotonic seconds, passed in."""

    def __init__(self, prompt_tokens_per_s: float = 0.0) -> None:
        self.num_steps = 0
        self.prompt_tokens_per_s = prompt_tokens_per_s
        self.itl_s = 0.0
        """Mean seconds between two steps that decode; 0 while nothing does."""
        self._busy_since: float | None = None
        self._began = 0.0
        self._allowed_s = 0.0
        self._ended = 0.0
        self._is_stepping = False
        self._busy = 0.0
        self._decoded_at: float | None = None

    def begin(self, now: float, num_tokens: int) -> None:
        """A step of so many tokens begins."""
        self._busy = _towards(self._busy, 0.0, now - self._ended)
        self._is_stepping = True
        self._began = now
        self._allowed_s = _PATIENCE * num_tokens / (self.prompt_tokens_per_s or _ASSUMED_TOKENS_PER_S)
        self._busy_since = now

    def end(self, now: float, num_prompt_tokens: int, *, decodes: bool = False) -> None:
        """The step has ended; steps of decoding only do not count for the rate."""
        self.num_steps += 1
        self._busy = _towards(self._busy, 1.0, now - self._began)
        self._is_stepping = False
        self._allowed_s = 0.0
        self._ended = now
        self._busy_since = now
        self._measure_gap(now if decodes else None)
        elapsed = now - self._began
        if elapsed <= 0 or num_prompt_tokens < _MIN_TOKENS:
            return
        rate = num_prompt_tokens / elapsed
        previous = self.prompt_tokens_per_s or rate
        weight = num_prompt_tokens / (num_prompt_tokens + _HALF_WEIGHT_TOKENS)
        self.prompt_tokens_per_s = previous + weight * (rate - previous)

    def idle(self) -> None:
        """There is nothing to do."""
        self._busy_since = None
        self._measure_gap(None)

    def tick_age_s(self, now: float) -> float:
        """Return the seconds since the loop should have turned: 0 when idle, or while a step takes no longer than one
        of its size may."""
        return 0.0 if self._busy_since is None else max(0.0, now - self._busy_since - self._allowed_s)

    def busy(self, now: float) -> float:
        """Return the share of the last seconds in which a step ran."""
        if self._is_stepping:
            return _towards(self._busy, 1.0, now - self._began)
        return _towards(self._busy, 0.0, now - self._ended)

    def _measure_gap(self, decoded_at: float | None) -> None:
        if decoded_at is None:
            self.itl_s = 0.0
        elif self._decoded_at is not None:
            gap_s = decoded_at - self._decoded_at
            self.itl_s += (_ITL_WEIGHT if self.itl_s else 1.0) * (gap_s - self.itl_s)
        self._decoded_at = decoded_at


def _towards(value: float, goal: float, elapsed_s: float) -> float:
    return goal + (value - goal) * math.exp(-max(0.0, elapsed_s) / _BUSY_S)

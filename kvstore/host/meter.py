"""Measures a step loop: how fast it computes prompt tokens, and how long ago it last turned."""

_HALF_WEIGHT_TOKENS = 512
"""A step of this many prompt tokens weighs as much as everything before it; a few tokens, whose step is bound by other
things than their number, weigh next to nothing."""

_MIN_FIRST_TOKENS = 32
"""Nothing is measured before a step of so many prompt tokens."""


class StepMeter:
    """Watches one step loop. Times are monotonic seconds, passed in."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.prompt_tokens_per_s = 0.0
        self._busy_since: float | None = None
        self._began = 0.0

    def begin(self, now: float) -> None:
        """A step begins."""
        self._began = now
        self._busy_since = now

    def end(self, now: float, num_prompt_tokens: int) -> None:
        """The step has ended; steps of decoding only do not count for the rate."""
        self.num_steps += 1
        self._busy_since = now
        elapsed = now - self._began
        if elapsed <= 0 or num_prompt_tokens < (1 if self.prompt_tokens_per_s else _MIN_FIRST_TOKENS):
            return
        rate = num_prompt_tokens / elapsed
        previous = self.prompt_tokens_per_s or rate
        weight = num_prompt_tokens / (num_prompt_tokens + _HALF_WEIGHT_TOKENS)
        self.prompt_tokens_per_s = previous + weight * (rate - previous)

    def idle(self) -> None:
        """There is nothing to do."""
        self._busy_since = None

    def tick_age_s(self, now: float) -> float:
        """Return the seconds since the loop last turned, 0 when idle."""
        return 0.0 if self._busy_since is None else now - self._busy_since

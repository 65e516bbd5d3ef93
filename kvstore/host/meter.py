"""Measures a step loop: how fast it computes prompt tokens, and how long ago it last turned."""

_SMOOTHING = 0.2
"""Weight of the newest step in the moving average."""


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
        if num_prompt_tokens > 1 and elapsed > 0:
            rate = num_prompt_tokens / elapsed
            previous = self.prompt_tokens_per_s or rate
            self.prompt_tokens_per_s = previous + _SMOOTHING * (rate - previous)

    def idle(self) -> None:
        """There is nothing to do."""
        self._busy_since = None

    def tick_age_s(self, now: float) -> float:
        """Return the seconds since the loop last turned, 0 when idle."""
        return 0.0 if self._busy_since is None else now - self._busy_since

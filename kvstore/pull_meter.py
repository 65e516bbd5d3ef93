"""How long this worker's fetches take, measured, and whether the next one beats computing."""

TRIED_AGAIN = 16
"""Of so many fetches that look too slow, one is tried."""

_SMOOTHING = 0.3
"""Weight of the newest fetch in the moving averages."""


class PullMeter:
    """Watches the fetches of one worker. Durations are in seconds, passed in."""

    def __init__(self) -> None:
        self._num_left_out = 0
        self.borrow_s = 0.0
        """Time to ask for a loan; 0 until measured."""
        self.tokens_per_s = 0.0
        """Rate of the pull itself; 0 until measured."""

    def borrowed(self, elapsed_s: float) -> None:
        """A loan was asked for and answered."""
        self.borrow_s += _SMOOTHING * (elapsed_s - self.borrow_s) if self.borrow_s else elapsed_s

    def pulled(self, num_tokens: int, elapsed_s: float) -> None:
        """So many tokens came; none says that the pull failed at once, which is as slow as it gets."""
        if elapsed_s <= 0:
            return
        rate = num_tokens / elapsed_s
        self.tokens_per_s += _SMOOTHING * (rate - self.tokens_per_s) if self.tokens_per_s else rate

    def is_cheaper(self, num_tokens: int, compute_tokens_per_s: float) -> bool:
        """Say whether fetching ``num_tokens`` is faster than computing them.

        What is not measured yet is tried, and so is one fetch after many that were left out: what made pulls slow may
        be over, and nothing else would show it.
        """
        if not self.tokens_per_s or not compute_tokens_per_s:
            return True
        if self.borrow_s + num_tokens / self.tokens_per_s < num_tokens / compute_tokens_per_s:
            return True
        self._num_left_out = (self._num_left_out + 1) % TRIED_AGAIN
        return self._num_left_out == 0

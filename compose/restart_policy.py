"""When a child that died is started again. Pure: times are arguments.

Waits double from ``FIRST_DELAY_S`` to ``MAX_DELAY_S`` and begin anew once a life has lasted ``STABLE_S``. Before the
cluster has been ready once, a child that dies ``MAX_EARLY_DEATHS`` times is given up; afterwards it never is.
"""

from common.cli import EXIT_BAD_CONFIG

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 15.0
STABLE_S = 30.0
MAX_EARLY_DEATHS = 3


class RestartPolicy:
    """Counts the deaths of one child. Owned by its keeper."""

    def __init__(self) -> None:
        self._deaths = 0

    def delay_s(self, exit_status: int, lived_s: float, *, was_ready: bool) -> float | None:
        """Return the seconds to wait before the next start, or None to give up.

        ``was_ready`` says whether the cluster has been ready since it was started. An exit with EXIT_BAD_CONFIG before
        that is given up at once: the same options would fail again.
        """
        if lived_s >= STABLE_S:
            self._deaths = 0
        self._deaths += 1
        if not was_ready and (exit_status == EXIT_BAD_CONFIG or self._deaths >= MAX_EARLY_DEATHS):
            return None
        return float(min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** min(self._deaths - 1, 16)))

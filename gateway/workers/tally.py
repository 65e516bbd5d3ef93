"""How much work a worker has: what this gateway gave it, at once, and what its record says beyond that, later.

A record is up to two heartbeats old. So what other gateways gave a worker is taken as its record's count minus the
most that this gateway had there since the record before; it is never below zero, and wrong by at most what changed in
one heartbeat. Pure.
"""


class Tally:
    """Counts one kind of work (sequences, or prompt tokens) of one worker."""

    def __init__(self) -> None:
        self._own = 0
        self._most_own = 0
        self._others = 0

    @property
    def total(self) -> int:
        """All the work there is."""
        return self._own + self._others

    def add(self, amount: int) -> None:
        """This gateway has decided to give the worker so much."""
        self._own += amount
        self._most_own = max(self._most_own, self._own)

    def remove(self, amount: int) -> None:
        """So much of what was added is done, or was not done."""
        self._own -= amount

    def observed(self, recorded: int) -> None:
        """A new record of the worker counts ``recorded``."""
        self._others = max(0, recorded - self._most_own)
        self._most_own = self._own

"""A clock that jumps from one event to the next. Pure."""

import heapq
from collections.abc import Callable


class VirtualClock:
    """Owns the events to come; those of one moment run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_asked = 0

    def at(self, time_s: float, call: Callable[[], None]) -> None:
        """Call ``call`` at ``time_s``, or now if that is past."""
        self._num_asked += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._num_asked, call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` in so many seconds."""
        self.at(self.now + seconds, call)

    def run(self, until_s: float, is_over: Callable[[], bool]) -> None:
        """Let events happen up to ``until_s``, or until ``is_over()``."""
        while self._events and self._events[0][0] <= until_s and not is_over():
            self.now, _, call = heapq.heappop(self._events)
            call()

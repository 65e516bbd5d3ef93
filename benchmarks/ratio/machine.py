"""How busy this machine's cores are, whoever uses them. Linux only."""

import time
from pathlib import Path

_TICK_S = 0.01
"""/proc/stat counts hundredths of a second."""


class BusyCores:
    """Counts from its making on."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._ticks = _busy_ticks()

    def mean(self) -> float:
        """Return how many cores were busy on average."""
        return (_busy_ticks() - self._ticks) * _TICK_S / (time.perf_counter() - self._began)


def _busy_ticks() -> int:
    user, nice, system, _idle, _waiting, *rest = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return user + nice + system + sum(rest[:2])

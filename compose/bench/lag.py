"""Whether the load generator itself was late: how long its event loop kept a timer waiting.

A generator that is short of processor time measures itself. It wakes every few milliseconds and notes by how much it
overslept; all times that it takes can be wrong by about as much.
"""

import asyncio
import time

INTERVAL_S = 0.005
LAG_LIMIT_S = 0.010
"""A 99th percentile above this is worth a warning."""
LATE_LIMIT_S = 0.050
"""So is a request that is sent so much later than it was due."""
BUSY_LIMIT = 0.9
"""So is a process that computes for more than this share of the run."""


class LagMeter:
    """Measures from :meth:`run` until cancelled. Owned by one run of the benchmark."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self._cpu_from = time.process_time()
        self._from = time.perf_counter()

    async def run(self) -> None:
        """Oversleep and note it."""
        while True:
            asleep_at = time.perf_counter()
            await asyncio.sleep(INTERVAL_S)
            self.lags_s.append(max(0.0, time.perf_counter() - asleep_at - INTERVAL_S))

    def busy_share(self) -> float:
        """Return the share of a core that this process has used so far."""
        return (time.process_time() - self._cpu_from) / max(1e-9, time.perf_counter() - self._from)


def client_warnings(lag_p99_s: float, late_p99_s: float, busy_share: float) -> list[str]:
    """Return why the figures may be the generator's own; nothing when they are not."""
    found = []
    if lag_p99_s > LAG_LIMIT_S:
        found.append(
            f"the load generator's event loop was late by {lag_p99_s * 1e3:.0f} ms (99th percentile): latencies may be "
            "its own; give it a core of its own or less load"
        )
    if late_p99_s > LATE_LIMIT_S:
        found.append(
            f"requests were sent {late_p99_s * 1e3:.0f} ms late (99th percentile): the load was not what you asked for"
        )
    if busy_share > BUSY_LIMIT:
        found.append(f"the load generator used {100 * busy_share:.0f} % of a core: it was the bottleneck")
    return found

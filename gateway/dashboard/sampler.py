"""Looks at the gateway once a second, remembers the last minutes, and tells everybody who watches.

One sampler serves any number of viewers: each second is measured once and encoded once, and a viewer that cannot keep
up misses seconds instead of delaying others. Nothing but the chart's point is made while nobody watches.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from common.messages import WorkerRecord
from gateway.admission import Admission
from gateway.cluster_status import cluster_status
from gateway.dashboard.reading import Reading, read
from gateway.dashboard.snapshot import (
    WINDOW_S,
    History,
    Point,
    PrefixRow,
    Snapshot,
    hand_overs,
    make_point,
    route_counts,
    stages,
)
from gateway.planner.runner import PlannerRunner
from gateway.request.flow import FlowServices
from gateway.telemetry.cache_ledger import total
from gateway.telemetry.prefix_ledger import SharedPrefix

SAMPLE_S = 1.0
HISTORY_POINTS = 900
"""A quarter of an hour."""
TOP_PREFIXES = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """One second, encoded."""

    number: int
    public: bytes
    full: bytes
    """With what only an operator may see."""


class Sampler:
    """Owns the history. Runs on the event loop from :meth:`run` until cancelled."""

    def __init__(
        self,
        services: FlowServices,
        admission: Admission,
        planner: PlannerRunner,
        *,
        model: str,
        version: str,
        first_words: Callable[[tuple[int, ...]], str],
    ) -> None:
        self._services = services
        self._admission = admission
        self._planner = planner
        self._model = model
        self._version = version
        self._first_words = first_words
        self._readings: deque[Reading] = deque(maxlen=int(WINDOW_S / SAMPLE_S) + 1)
        self._points: deque[Point] = deque(maxlen=HISTORY_POINTS)
        self._frame: Frame | None = None
        self._changed = asyncio.Event()
        self._num_samples = 0
        self._num_viewers = 0
        self._is_closed = False

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            self.sample(asyncio.get_running_loop().time(), time.time_ns() // 1_000_000_000)
            await asyncio.sleep(SAMPLE_S)

    def sample(self, now: float, unix_time: int) -> None:
        """Look once, at ``now`` of the event loop's clock."""
        records = [worker.record for worker in self._services.cluster.view().workers]
        cache = total(self._services.cache.counts(now, WINDOW_S))
        self._readings.append(read(self._services.metrics, cache, now))
        self._points.append(make_point(self._readings, records, unix_time))
        self._num_samples += 1
        self._frame = self._encode(records) if self._num_viewers else None
        self._notify()

    def close(self) -> None:
        """End every viewer's stream, and those of viewers who still come."""
        self._is_closed = True
        self._notify()

    async def frames(self, *, is_operator: bool) -> AsyncGenerator[bytes, None]:
        """Yield the history, the present, and from then on each second, as JSON; ends with :meth:`close`."""
        with self._viewing():
            yield msgspec.json.encode(History(self._model, self._version, Point.__struct_fields__, list(self._points)))
            seen = 0
            while not self._is_closed:
                if self._frame is not None and self._frame.number > seen:
                    seen = self._frame.number
                    yield self._frame.full if is_operator else self._frame.public
                else:
                    await self._changed.wait()

    @contextmanager
    def _viewing(self) -> Iterator[None]:
        self._num_viewers += 1
        self._services.metrics.dashboard_viewers.set(self._num_viewers)
        try:
            if self._frame is None and self._points:
                self._frame = self._encode([worker.record for worker in self._services.cluster.view().workers])
            yield
        finally:
            self._num_viewers -= 1
            self._services.metrics.dashboard_viewers.set(self._num_viewers)

    def _encode(self, records: list[WorkerRecord]) -> Frame:
        public = Snapshot(
            point=self._points[-1],
            cluster=cluster_status(self._services.cluster, self._planner),
            requests_in_flight=self._admission.in_flight,
            routes=route_counts(self._readings),
            stages=stages(self._readings),
            hand_overs=hand_overs(records),
            prefixes=None,
        )
        top = [self._prefix(prefix) for prefix in self._services.prefixes.top(TOP_PREFIXES)]
        full = msgspec.structs.replace(public, prefixes=top)
        return Frame(self._num_samples, msgspec.json.encode(public), msgspec.json.encode(full))

    def _prefix(self, prefix: SharedPrefix) -> PrefixRow:
        return PrefixRow(
            hash=prefix.block_hash.hex(),
            first_words=self._first_words(prefix.head),
            tokens=prefix.num_tokens,
            requests=prefix.num_requests,
            hit_rate=prefix.hit_rate,
            saved_tokens=prefix.saved_tokens,
        )

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

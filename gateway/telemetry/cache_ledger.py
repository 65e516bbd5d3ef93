"""What the workers' prefix caches have saved, over any of the last minutes: a history of the counts in their records.

The workers count; this only remembers when. A life that is over keeps its counts. A window reaches back no further than
this gateway does, and says so. Pure: time is an argument.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from common.ids import Epoch, WorkerId
from common.messages import Role, WorkerRecord

MAX_WINDOW_S = 3600.0
"""No window but the whole history is longer."""

MAX_LIVES = 512
"""Lives that are remembered; of more, those that ended first are forgotten."""


@dataclass(frozen=True, slots=True)
class CacheCounts:
    """Counts of one worker or several, in tokens where nothing else is said."""

    queries: int = 0
    hits: int = 0
    peer: int = 0
    """Hits that were pulled from a prefill worker."""
    decode: int = 0
    """Hits in a decode worker's cache, used there or pulled from there."""
    saved_ms: int = 0
    """Time that computing the hits would have taken."""
    unpriced: int = 0
    """Hits of workers that had not measured their rate yet; not in ``saved_ms``."""
    evictions: int = 0
    """Blocks."""

    @property
    def local(self) -> int:
        """Hits in the own cache of the prefill worker that computed the rest."""
        return self.hits - self.peer - self.decode

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were hits; 0 when there were none."""
        return round(self.hits / self.queries, 6) if self.queries else 0.0

    def __add__(self, other: "CacheCounts") -> "CacheCounts":
        return CacheCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def __sub__(self, other: "CacheCounts") -> "CacheCounts":
        return CacheCounts(*(getattr(self, one.name) - getattr(other, one.name) for one in fields(self)))

    @classmethod
    def of(cls, record: WorkerRecord) -> "CacheCounts":
        """Return the counts in a worker's record."""
        counters = record.counters
        return cls(
            counters.get("prefix_cache_queries", 0),
            counters.get("prefix_cache_hits", 0),
            counters.get("prefix_cache_hits_peer", 0),
            counters.get("prefix_cache_hits_decode", 0),
            counters.get("prefix_cache_saved_ms", 0),
            counters.get("prefix_cache_unpriced", 0),
            counters.get("evictions", 0),
        )


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """What one worker's lives have counted in one role."""

    worker_id: WorkerId
    role: Role
    counts: CacheCounts


@dataclass(frozen=True, slots=True)
class _Sample:
    at: float
    counts: CacheCounts


class _Life:
    def __init__(self, baseline: _Sample) -> None:
        self.latest = baseline.counts
        self.samples: deque[_Sample] = deque([baseline])  # each holds from its time on, until the next

    def observe(self, counts: CacheCounts, now: float) -> None:
        if counts != self.latest:
            self.latest = counts
            self.samples.append(_Sample(now, counts))
        while len(self.samples) > 1 and self.samples[1].at <= now - MAX_WINDOW_S:
            self.samples.popleft()

    def since(self, start: float) -> CacheCounts:
        before = self.samples[0]
        for sample in self.samples:
            if sample.at > start:
                break
            before = sample
        return self.latest - before.counts


class CacheLedger:
    """Owned by the gateway, told of every read of the registry."""

    def __init__(self) -> None:
        self._lives: dict[tuple[WorkerId, Epoch, Role], _Life] = {}
        self._began_at: float | None = None

    def observe(self, records: Iterable[WorkerRecord], now: float) -> None:
        """Take the records as they are at ``now``."""
        is_first = self._began_at is None
        self._began_at = now if self._began_at is None else self._began_at
        for record in records:
            key, counts = (record.worker_id, record.epoch, record.role), CacheCounts.of(record)
            life = self._lives.pop(key, None)
            if life is None:
                # what a worker counted before this gateway began is in no window; what a new one has is in all
                life = _Life(_Sample(now, counts if is_first else CacheCounts()))
            life.observe(counts, now)
            self._lives[key] = life  # last seen last
        while len(self._lives) > MAX_LIVES:
            del self._lives[next(iter(self._lives))]

    def covered_s(self, now: float, window_s: float | None) -> float:
        """Return how many seconds a window really covers."""
        since_start = 0.0 if self._began_at is None else now - self._began_at
        return since_start if window_s is None else min(window_s, since_start)

    def counts(self, now: float, window_s: float | None) -> Sequence[WorkerCounts]:
        """Return what each worker counted in the last ``window_s`` seconds; None is since the workers' starts."""
        found: dict[tuple[WorkerId, Role], CacheCounts] = {}
        for (worker_id, _, role), life in self._lives.items():
            counts = life.latest if window_s is None else life.since(now - window_s)
            key = (worker_id, role)
            found[key] = found.get(key, CacheCounts()) + counts
        return [WorkerCounts(worker_id, role, counts) for (worker_id, role), counts in sorted(found.items())]


def total(workers: Iterable[WorkerCounts]) -> CacheCounts:
    """Return the counts of all of them together."""
    return sum((worker.counts for worker in workers), CacheCounts())

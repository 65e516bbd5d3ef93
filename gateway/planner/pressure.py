"""How hard each pool is pressed, from the workers' records. Pure.

1 is where the target is missed. Prefill: the prompt tokens that are queued over the rate at which the pool computes
them, against the target for the first token. Decode: the worst of KV use, the time between tokens against its target,
and the wait for room against the target for the first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.messages import Role
from gateway.planner.ratio import Ratio, is_settled, live, ratio_of
from gateway.router import ClusterView, RouterLimits, WorkerView, is_stuck

MAX_VIEW_AGE_S = 3.0
"""A view that is older says nothing of the present."""

BUSY = 0.5
"""Prefill workers that compute less of the time than this are not what their queue waits for."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What a good answer is."""

    ttft_s: float
    itl_s: float


@dataclass(frozen=True, slots=True)
class Pressure:
    """One look at the cluster."""

    ratio: Ratio
    is_settled: bool
    """No worker is on its way out or into another role."""
    num_sequences: int
    """Sequences and prompts in work or waiting anywhere."""
    prefill_wait: float
    """Seconds that the queued prompts take, over the target."""
    prefill_busy: float
    """Share of the last seconds in which prefill workers computed."""
    kv_use: float
    """Share of the decode workers' KV blocks that are held."""
    itl: float
    """Time between tokens on the slowest decode worker, over the target."""
    admission: float
    """Longest wait for room on a decode worker, over the target for the first token."""
    mean_itl: float | None = None
    """Time between tokens, a mean of the decode workers that write, over the target; None: as on the slowest."""
    missing: str = ""
    """What cannot be known now; empty: nothing, all of the above may be believed."""

    @property
    def prefill(self) -> float:
        """How hard the prefill pool is pressed. A queue before workers that rest waits for the decode workers' room."""
        return self.prefill_wait * min(1.0, self.prefill_busy / BUSY)

    @property
    def decode(self) -> float:
        """How hard the decode pool is pressed."""
        return max(self.kv_use, self.itl, self.admission)


def look(view: ClusterView, limits: RouterLimits, targets: Targets, now: float) -> Pressure:
    """Return how hard the pools are pressed at ``now``."""
    workers = live(view)
    readers = [worker for worker in workers if worker.record.role is Role.PREFILL]
    writers = [worker for worker in workers if worker.record.role is Role.DECODE]
    blocks = [worker.record.blocks for worker in writers]
    wait_s = _queued_s(readers)
    return Pressure(
        ratio=ratio_of(workers),
        is_settled=is_settled(workers),
        num_sequences=sum(worker.num_sequences + (worker.queued_tokens > 0) for worker in workers),
        prefill_wait=(wait_s or 0.0) / targets.ttft_s,
        prefill_busy=_mean([worker.record.load.busy for worker in readers]),
        kv_use=sum(one.held for one in blocks) / max(1, sum(one.total for one in blocks)),
        itl=max((worker.record.load.itl_s for worker in writers), default=0.0) / targets.itl_s,
        admission=max((worker.record.load.admission_wait_s for worker in writers), default=0.0) / targets.ttft_s,
        mean_itl=_mean_itl_s(writers) / targets.itl_s,
        missing=_missing(view, workers, limits, now) or ("" if wait_s is not None else "rate of the prefill workers"),
    )


def _missing(view: ClusterView, workers: Sequence[WorkerView], limits: RouterLimits, now: float) -> str:
    if not view.redis_is_up or now - view.polled_at > MAX_VIEW_AGE_S:
        return "registry"
    stuck = sorted(worker.worker_id for worker in workers if is_stuck(worker, limits))
    return f"progress of {stuck[0]}" if stuck else ""


def _queued_s(readers: Sequence[WorkerView]) -> float | None:
    """Return how long the queued prompts take; None when that is not measured."""
    queued = sum(worker.queued_tokens for worker in readers)
    rates = [rate for worker in readers if (rate := worker.record.load.tokens_per_s)]
    if not queued:
        return 0.0
    return queued / (_mean(rates) * len(readers)) if rates else None


def _mean_itl_s(writers: Sequence[WorkerView]) -> float:
    return _mean([worker.record.load.itl_s for worker in writers if worker.record.load.itl_s])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""Where a sequence is decoded, who computes its prompt, and why.

Pure: the view of the cluster and the time are arguments. Work counts from the decision on (the view holds what this
gateway has given out and what a worker's record says beyond that), so a burst is spread. The decode worker is chosen
first, by load; then what it does not hold of the prompt decides between itself and a prefill worker.
"""

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from common.ids import WorkerId
from common.messages import PlanKind, Role, WorkerRecord, WorkerState

STALE_AFTER_S = 2.0
"""A worker whose record was missing for this long, while Redis answered, is gone. (A flush empties Redis for up to one
heartbeat.)"""

FILL_WEIGHT = 0.4
"""How much more a full pool's worker costs than an empty one's; below 0.5, so that load always comes first."""

ASSUMED_TOKENS_PER_S = 1000.0
"""Prompt tokens a second of a worker that has not measured itself yet."""


class Reason(enum.StrEnum):
    """Why a prompt is computed where it is."""

    REMOTE = "remote"  # long enough to be worth a prefill worker
    SHORT_PROMPT = "short_prompt"  # few tokens
    CACHED = "cached"  # few tokens beyond what the decode worker holds
    NO_PREFILL_WORKER = "no_prefill_worker"  # none is ready
    INCOMPATIBLE = "incompatible"  # those that are ready hold another model or layout than the decode worker
    REDIS_UNAVAILABLE = "redis_unavailable"  # the queue cannot be reached
    PREFILL_BUSY = "prefill_busy"  # the wait would be longer than it is worth
    PREFILL_LATE = "prefill_late"  # the chosen prefill worker did not begin in time
    PREFILL_LOST = "prefill_lost"  # the chosen prefill worker is gone, and had begun


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a gateway knows of one worker."""

    record: WorkerRecord
    seen_at: float
    """When its record was last read."""
    connected: bool
    """A decode worker's session stands; of a prefill worker nothing is known, so True."""
    num_sequences: int
    """Running, waiting and on the way."""
    queued_tokens: int
    """Prompt tokens to compute, those on the way included."""

    @property
    def worker_id(self) -> WorkerId:
        """The worker's name."""
        return self.record.worker_id


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What a gateway knows of all workers."""

    workers: Sequence[WorkerView]
    polled_at: float
    """When Redis last answered."""
    redis_is_up: bool


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """The operator's choices."""

    local_prefill_tokens: int
    max_prefill_wait_s: float
    max_tick_age_s: float


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """Who computes a prompt."""

    kind: PlanKind
    reason: Reason
    prefill: WorkerView | None = None
    """Set when ``kind`` is remote."""
    wait_s: float = 0.0
    """Estimated seconds until the prompt would be computed there."""


def is_stale(view: ClusterView, worker: WorkerView) -> bool:
    """Whether Redis answers and no longer knows the worker."""
    return view.polled_at - worker.seen_at > STALE_AFTER_S


def is_stuck(worker: WorkerView, limits: RouterLimits) -> bool:
    """Whether the worker's step loop stands still although it has work."""
    return worker.record.load.tick_age_s > limits.max_tick_age_s


def usable(view: ClusterView, role: Role, limits: RouterLimits) -> list[WorkerView]:
    """Return the workers of ``role`` that may be given work now."""
    return [
        worker
        for worker in view.workers
        if worker.record.role is role
        and worker.record.state is WorkerState.READY
        and worker.connected
        and not is_stale(view, worker)
        and not is_stuck(worker, limits)
    ]


def choose_decode(
    view: ClusterView,
    num_tokens: int,
    *,
    limits: RouterLimits,
    exclude: Collection[WorkerId] = (),
    draw: float = 0.0,
) -> WorkerView | None:
    """Return the decode worker for a sequence of ``num_tokens`` tokens so far, or None when there is none.

    Workers whose free blocks hold it go first; among them the least loaded. ``draw`` in [0, 1) decides between equals,
    so that several gateways do not all begin with the same one.
    """
    ready = [worker for worker in usable(view, Role.DECODE, limits) if worker.worker_id not in exclude]
    roomy = [worker for worker in ready if _has_room(worker, num_tokens)]
    return _cheapest([(_decode_cost(worker), worker) for worker in roomy or ready], draw)


def choose_plan(
    view: ClusterView,
    decode: WorkerView,
    *,
    num_tokens: int,
    cached_tokens: int,
    limits: RouterLimits,
    exclude: Collection[WorkerId] = (),
    draw: float = 0.0,
) -> PlanChoice:
    """Return who computes a prompt of ``num_tokens``, of which ``decode`` holds the first ``cached_tokens``."""
    missing = num_tokens - cached_tokens
    if missing <= limits.local_prefill_tokens:
        return PlanChoice(PlanKind.LOCAL, Reason.CACHED if cached_tokens else Reason.SHORT_PROMPT)
    ready = [worker for worker in usable(view, Role.PREFILL, limits) if worker.worker_id not in exclude]
    if not view.redis_is_up:
        return PlanChoice(PlanKind.LOCAL, Reason.REDIS_UNAVAILABLE)
    if not ready:
        return PlanChoice(PlanKind.LOCAL, Reason.NO_PREFILL_WORKER)
    matching = [worker for worker in ready if worker.record.fingerprint == decode.record.fingerprint]
    prefill = _cheapest([(_prefill_wait_s(worker, missing), worker) for worker in matching], draw)
    if prefill is None:
        return PlanChoice(PlanKind.LOCAL, Reason.INCOMPATIBLE)
    wait_s = _prefill_wait_s(prefill, missing)
    if wait_s > limits.max_prefill_wait_s and _prefill_wait_s(decode, missing) < wait_s:
        return PlanChoice(PlanKind.LOCAL, Reason.PREFILL_BUSY)
    return PlanChoice(PlanKind.REMOTE, Reason.REMOTE, prefill, wait_s)


def _has_room(worker: WorkerView, num_tokens: int) -> bool:
    blocks = worker.record.blocks
    needed = num_tokens // worker.record.fingerprint.block_size + 1
    return needed <= blocks.free + blocks.cached


def _decode_cost(worker: WorkerView) -> float:
    blocks = worker.record.blocks
    fill = blocks.held / blocks.total if blocks.total else 1.0
    return (worker.num_sequences + 1) * (1 + FILL_WEIGHT * fill)


def _prefill_wait_s(worker: WorkerView, num_tokens: int) -> float:
    tokens_per_s = worker.record.load.tokens_per_s or ASSUMED_TOKENS_PER_S
    return (worker.queued_tokens + num_tokens) / tokens_per_s


def _cheapest(priced: Sequence[tuple[float, WorkerView]], draw: float) -> WorkerView | None:
    if not priced:
        return None
    best = min(cost for cost, _ in priced)
    equals = [worker for cost, worker in priced if cost == best]
    return equals[int(draw * len(equals))]

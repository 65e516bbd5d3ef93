"""The cluster as this gateway sees it, in the form that clients are told."""

from collections.abc import Iterable

import msgspec

from common.messages import BlockCounts, Fingerprint, PlannerStep, Role, SlotCounts
from gateway.planner.pressure import Pressure
from gateway.planner.runner import PlannerRunner
from gateway.router import WorkerView
from gateway.workers.cluster import Cluster


class WorkerStatus(msgspec.Struct, frozen=True):
    """One worker, as its last record says."""

    id: str
    role: Role
    pid: int
    epoch: int
    address: str
    state: str
    connected: bool
    """False for a decode worker that this gateway has no session with."""
    device: str
    max_model_len: int
    """Tokens of prompt and answer together at most."""
    running: int
    waiting: int
    tick_age_s: float
    blocks: BlockCounts
    slots: SlotCounts
    kv_waste: float
    """Share of the slots in held blocks that hold no token."""
    fingerprint: Fingerprint
    """What two workers must have in common to exchange blocks."""


class Ratio(msgspec.Struct, frozen=True):
    """How many workers have which role."""

    prefill: int
    decode: int


class PoolPressure(msgspec.Struct, frozen=True):
    """How hard the pools are pressed; 1 is where the target is missed."""

    prefill: float
    decode: float
    prefill_wait: float
    prefill_busy: float
    kv_use: float
    itl: float
    admission: float
    missing: str
    """What cannot be known now; empty: nothing."""


class PlannerStatus(msgspec.Struct, frozen=True):
    """Who plans the ratio, and what was decided last."""

    mode: str
    leader: str
    """Empty when nobody plans."""
    home: str
    """The ratio that an idle cluster returns to; empty when nobody plans."""
    local_prefill_tokens: int
    steps: tuple[PlannerStep, ...]


class Totals(msgspec.Struct, frozen=True):
    """All workers together."""

    running: int
    waiting: int
    blocks: BlockCounts
    slots: SlotCounts
    kv_waste: float


class ClusterStatus(msgspec.Struct, frozen=True):
    """The cluster as this gateway sees it."""

    workers: list[WorkerStatus]
    ratio: Ratio
    pressure: PoolPressure
    planner: PlannerStatus
    totals: Totals
    redis: str
    """``up`` or ``down``."""


def cluster_status(cluster: Cluster, planner: PlannerRunner) -> ClusterStatus:
    """Return what clients are told of the cluster now."""
    view = cluster.view()
    roles = [worker.record.role for worker in view.workers]
    return ClusterStatus(
        [_worker(worker) for worker in sorted(view.workers, key=lambda worker: worker.worker_id)],
        Ratio(roles.count(Role.PREFILL), roles.count(Role.DECODE)),
        _pressure(planner.pressure()),
        _planner(planner, cluster.limits.local_prefill_tokens),
        _totals(view.workers),
        "up" if view.redis_is_up else "down",
    )


def kv_waste(slots: SlotCounts) -> float:
    """Return the share of ``slots`` that holds no token."""
    return round(1 - slots.used / slots.allocated, 6) if slots.allocated else 0.0


def _pressure(seen: Pressure) -> PoolPressure:
    values = {name: round(getattr(seen, name), 4) for name in PoolPressure.__struct_fields__ if name != "missing"}
    return PoolPressure(**values, missing=seen.missing)


def _planner(planner: PlannerRunner, local_prefill_tokens: int) -> PlannerStatus:
    state = planner.state
    if state is None:
        return PlannerStatus(planner.mode, "", "", local_prefill_tokens, ())
    return PlannerStatus(state.mode, state.leader, state.home, local_prefill_tokens, state.steps)


def _worker(worker: WorkerView) -> WorkerStatus:
    record = worker.record
    return WorkerStatus(
        id=record.worker_id,
        role=record.role,
        pid=record.pid,
        epoch=record.epoch,
        address=record.address,
        state=record.state,
        connected=worker.connected,
        device=record.device,
        max_model_len=record.max_model_len,
        running=record.load.running,
        waiting=record.load.waiting,
        tick_age_s=record.load.tick_age_s,
        blocks=record.blocks,
        slots=record.slots,
        kv_waste=kv_waste(record.slots),
        fingerprint=record.fingerprint,
    )


def _totals(workers: Iterable[WorkerView]) -> Totals:
    records = [worker.record for worker in workers]
    blocks = [record.blocks for record in records]
    slots = SlotCounts(sum(record.slots.allocated for record in records), sum(record.slots.used for record in records))
    return Totals(
        running=sum(record.load.running for record in records),
        waiting=sum(record.load.waiting for record in records),
        blocks=BlockCounts(
            total=sum(count.total for count in blocks),
            free=sum(count.free for count in blocks),
            cached=sum(count.cached for count in blocks),
            held=sum(count.held for count in blocks),
            quarantined=sum(count.quarantined for count in blocks),
        ),
        slots=slots,
        kv_waste=kv_waste(slots),
    )

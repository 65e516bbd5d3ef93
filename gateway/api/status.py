"""``/health``, ``/ready``, ``/version``, ``/metrics`` and ``GET /v1/cluster``."""

from collections.abc import Iterable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from common.errors import Unavailable
from common.messages import BlockCounts, PlannerStep, Role, SlotCounts
from gateway.parts import Parts, baton_version, parts_of
from gateway.planner.pressure import Pressure
from gateway.router import WorkerView


class Status(msgspec.Struct, frozen=True):
    """A word."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """The version of this program."""

    version: str


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
    running: int
    waiting: int
    tick_age_s: float
    blocks: BlockCounts
    slots: SlotCounts
    kv_waste: float
    """Share of the slots in held blocks that hold no token."""


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


async def health(request: Request) -> Response:
    """Say that the process is alive."""
    return _json(Status("ok"))


async def ready(request: Request) -> Response:
    """Say whether requests can be served; raises Unavailable, with what is missing, when not."""
    parts = parts_of(request)
    if parts.admission.is_draining:
        raise Unavailable("the gateway is shutting down", retry_after_s=1.0)
    needed = [Role.DECODE, Role.PREFILL] if parts.config.prefill_expected else [Role.DECODE]
    missing = [role for role in needed if not parts.services.cluster.usable(role)]
    if missing:
        raise Unavailable(f"no {' and no '.join(missing)} worker is ready", retry_after_s=1.0)
    return _json(Status("ready"))


async def version(request: Request) -> Response:
    """Return the version."""
    return _json(Version(baton_version()))


async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    body = b"".join([generate_latest(registry) for registry in parts_of(request).registries])
    return Response(body, media_type=CONTENT_TYPE_LATEST)


async def cluster(request: Request) -> Response:
    """Return the workers, their load and their blocks."""
    parts = parts_of(request)
    view = parts.services.cluster.view()
    roles = [worker.record.role for worker in view.workers]
    return _json(
        ClusterStatus(
            [_worker(worker) for worker in sorted(view.workers, key=lambda worker: worker.worker_id)],
            Ratio(roles.count(Role.PREFILL), roles.count(Role.DECODE)),
            _pressure(parts.planner.pressure()),
            _planner(parts),
            _totals(view.workers),
            "up" if view.redis_is_up else "down",
        )
    )


def _pressure(seen: Pressure) -> PoolPressure:
    values = {name: round(getattr(seen, name), 4) for name in PoolPressure.__struct_fields__ if name != "missing"}
    return PoolPressure(**values, missing=seen.missing)


def _planner(parts: Parts) -> PlannerStatus:
    state, tokens = parts.planner.state, parts.services.cluster.limits.local_prefill_tokens
    if state is None:
        return PlannerStatus(parts.planner.mode, "", "", tokens, ())
    return PlannerStatus(state.mode, state.leader, state.home, tokens, state.steps)


def kv_waste(slots: SlotCounts) -> float:
    """Return the share of ``slots`` that holds no token."""
    return round(1 - slots.used / slots.allocated, 6) if slots.allocated else 0.0


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
        running=record.load.running,
        waiting=record.load.waiting,
        tick_age_s=record.load.tick_age_s,
        blocks=record.blocks,
        slots=record.slots,
        kv_waste=kv_waste(record.slots),
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


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")

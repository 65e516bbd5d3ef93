"""What an operator asks: ``POST /v1/cluster/drain`` and ``GET /debug/kv``."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import BatonError, NotFound
from common.ids import WorkerId
from common.messages import Drain, Inspect, KvReport, WorkerRecord
from common.services import DRAIN, INSPECT, Method
from gateway.api.body import read_json_body
from gateway.api.fields import decode
from gateway.parts import Parts, parts_of

CALL_TIMEOUT_S = 3.0
MAX_BODY_BYTES = 4096


class DrainFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a drain call."""

    worker: WorkerId


class DrainReply(msgspec.Struct, frozen=True):
    """The worker has begun to drain; its record says when it is gone."""

    worker: WorkerId
    epoch: int
    state: str = "draining"


class WorkerReport(msgspec.Struct, frozen=True):
    """One worker's report, or why there is none."""

    worker: WorkerId
    report: KvReport | None = None
    error: str | None = None


class KvDebug(msgspec.Struct, frozen=True):
    """What every process holds."""

    gateway: "GatewayReport"
    workers: list[WorkerReport]


class GatewayReport(msgspec.Struct, frozen=True):
    """What this gateway holds."""

    requests_in_flight: int


_DRAIN = msgspec.json.Decoder(DrainFields)


async def drain(request: Request) -> Response:
    """Let a worker take nothing new, finish or move what it has, and exit; raises NotFound for an unknown one."""
    parts = parts_of(request)
    fields = decode(await read_json_body(request, MAX_BODY_BYTES), _DRAIN)
    record = _record(parts, fields.worker)
    await _call(parts, record, DRAIN, Drain(record.epoch))
    return _json(DrainReply(record.worker_id, record.epoch))


async def debug_kv(request: Request) -> Response:
    """Show leases, sequences, quarantined blocks and the pool's books of every worker."""
    parts = parts_of(request)
    records = sorted(
        (view.record for view in parts.services.cluster.view().workers), key=lambda record: record.worker_id
    )
    reports = await asyncio.gather(*(_inspect(parts, record) for record in records))
    return _json(KvDebug(GatewayReport(parts.admission.in_flight), list(reports)))


async def _inspect(parts: Parts, record: WorkerRecord) -> WorkerReport:
    try:
        return WorkerReport(record.worker_id, await _call(parts, record, INSPECT, Inspect(record.epoch)))
    except BatonError as error:
        return WorkerReport(record.worker_id, error=error.message)


async def _call(parts: Parts, record: WorkerRecord, method: Method, message: msgspec.Struct) -> Any:
    client = parts.services.cluster.client(record)
    try:
        return await client.call(method, message, CALL_TIMEOUT_S)
    finally:
        await client.close()


def _record(parts: Parts, worker_id: WorkerId) -> WorkerRecord:
    for view in parts.services.cluster.view().workers:
        if view.worker_id == worker_id:
            return view.record
    raise NotFound(f"there is no worker {worker_id[:100]!r}", param="worker")


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")

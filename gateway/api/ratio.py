"""``POST /v1/cluster/ratio``: change how many workers have which role, while they serve."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequest
from common.ids import WorkerId
from common.messages import Role
from gateway.api.body import read_json_body
from gateway.api.fields import decode
from gateway.parts import parts_of
from gateway.planner.ratio import parse_ratio

MAX_BODY_BYTES = 4096
MAX_DRAIN_S = 600.0


class RatioFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a change."""

    ratio: str
    """PREFILL:DECODE."""
    drain_s: float | None = None
    """Seconds that running work of a worker gets before it moves; None: the gateway's ``--planner-drain-s``."""


class ChangedWorker(msgspec.Struct, frozen=True):
    """One worker that has taken another role."""

    worker: WorkerId
    role: Role
    seconds: float


class RatioReply(msgspec.Struct, frozen=True):
    """The ratio as it is now, and what was changed for it, in order."""

    ratio: str
    changed: list[ChangedWorker]


_DECODER = msgspec.json.Decoder(RatioFields)


async def set_ratio(request: Request) -> Response:
    """Answer when the last worker has taken its role; raises as :meth:`gateway.planner.changer.RatioChanger.set_ratio`.

    A client that leaves meanwhile does not stop the change.
    """
    parts = parts_of(request)
    fields = decode(await read_json_body(request, MAX_BODY_BYTES), _DECODER)
    target = parse_ratio(fields.ratio)
    drain_s = parts.config.planner_drain_s if fields.drain_s is None else fields.drain_s
    if not 0 <= drain_s <= MAX_DRAIN_S:
        raise InvalidRequest(f"drain_s must be between 0 and {MAX_DRAIN_S:g}", param="drain_s")
    changes = await parts.changer.set_ratio(target, drain_s)
    changed = [ChangedWorker(one.worker, one.role, round(one.seconds, 3)) for one in changes]
    return Response(msgspec.json.encode(RatioReply(str(target), changed)), media_type="application/json")

"""``/health``, ``/ready``, ``/version``, ``/metrics`` and ``GET /v1/cluster``."""

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response

from common.errors import Unavailable
from common.messages import Role
from gateway.cluster_status import cluster_status
from gateway.parts import baton_version, parts_of


class Status(msgspec.Struct, frozen=True):
    """A word."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """The version of this program."""

    version: str


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
    return _json(cluster_status(parts.services.cluster, parts.planner))


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")

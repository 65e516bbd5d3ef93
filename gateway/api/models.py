"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import Unavailable
from gateway.errors import ModelNotFound
from gateway.parts import Parts, parts_of


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model that is served."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "baton"
    root: str
    parent: None = None
    max_model_len: int | None
    """Tokens of prompt and answer together; null while no decode worker is ready."""


class ModelList(msgspec.Struct, frozen=True):
    """All of them."""

    data: list[ModelCard]
    object: str = "list"


async def list_models(request: Request) -> Response:
    """Return the models."""
    return _json(ModelList([_card(parts_of(request))]))


async def get_model(request: Request) -> Response:
    """Return one model; raises ModelNotFound."""
    parts, name = parts_of(request), request.path_params["model"]
    if name != parts.config.model_name:
        raise ModelNotFound(f"the model {name[:100]!r} is not served here", param="model")
    return _json(_card(parts))


def _card(parts: Parts) -> ModelCard:
    name = parts.config.model_name
    try:
        max_model_len = parts.services.cluster.max_model_len()
    except Unavailable:
        max_model_len = None
    return ModelCard(id=name, created=parts.started_at, root=name, max_model_len=max_model_len)


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")

"""The HTTP application: which address is answered by what."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from common.errors import BatonError
from gateway.api import admin, cache, dashboard, endpoints, models, openapi, ratio, status, tokens
from gateway.http.door import Door, on_error, on_http_exception
from gateway.parts import Parts

ROUTES = [
    Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
    Route("/v1/completions", endpoints.text_completions, methods=["POST"]),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    Route("/v1/models", models.list_models),
    Route("/v1/models/{model:path}", models.get_model),
    Route("/v1/cluster", status.cluster),
    Route("/v1/cache/stats", cache.stats),
    Route("/v1/cache/prefixes", cache.prefixes),
    Route("/v1/cache/lookup", cache.lookup, methods=["POST"]),
    Route("/v1/cache/reset", cache.reset, methods=["POST"]),
    Route("/v1/cluster/drain", admin.drain, methods=["POST"]),
    Route("/v1/cluster/ratio", ratio.set_ratio, methods=["POST"]),
    Route("/debug/kv", admin.debug_kv),
    Route("/health", status.health),
    Route("/ready", status.ready),
    Route("/version", status.version),
    Route("/metrics", status.metrics),
    Route("/openapi.json", openapi.openapi),
]

PAGES = [
    Route("/dashboard", dashboard.page),
    Route("/dashboard/{path:path}", dashboard.asset),
    Route("/v1/dashboard/events", dashboard.events),
]
"""For people: not in the API's description."""


def build_app(parts: Parts) -> ASGIApp:
    """Return the application of one gateway."""
    app = Starlette(
        routes=[*ROUTES, *PAGES],
        exception_handlers={BatonError: on_error, HTTPException: on_http_exception},
    )
    app.router.redirect_slashes = False
    app.state.parts = parts
    return Door(app, parts.keys, parts.metrics)

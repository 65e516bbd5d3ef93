"""``GET /openapi.json``: every route of the gateway, with the types that it really decodes and encodes.

The schemas are made from those types, so they cannot say something else. Bounds of values are in docs/api.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.api import (
    admin,
    cache,
    chat,
    chat_reply,
    completion_reply,
    completions,
    models,
    ratio,
    status,
    tokens,
)
from gateway.cluster_status import ClusterStatus
from gateway.http.errors import ErrorReply
from gateway.parts import baton_version

_REF = "#/components/schemas/{name}"
_DONE = "[DONE]"

WRONG, KEY, MISSING, SLOW, BUSY, LARGE, FULL, FAULT, NOBODY, LATE = 400, 401, 404, 408, 409, 413, 429, 500, 503, 504
_BODY = (WRONG, SLOW, LARGE)
_MEANINGS = {
    WRONG: "The input is wrong; param names the field.",
    KEY: "The key is missing or wrong.",
    MISSING: "There is no such model or worker.",
    SLOW: "The body did not arrive in time.",
    BUSY: "Another change is under way.",
    LARGE: "The body is too large.",
    FULL: "There is no room now; Retry-After says when to come back.",
    FAULT: "A fault of the server's.",
    NOBODY: "No worker can serve this now.",
    LATE: "The request took too long.",
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One route and method."""

    path: str
    method: str
    summary: str
    reply: type[msgspec.Struct] | None
    """Type of the answer with status 200; None for plain text."""
    errors: Sequence[int] = ()
    body: type[msgspec.Struct] | None = None
    chunk: type[msgspec.Struct] | None = None
    """Type of what an event holds where the answer may be a stream."""
    examples: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Bodies by their names."""
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_ANSWERS = (*_BODY, KEY, MISSING, FULL, FAULT, NOBODY, LATE)
_WINDOW: dict[str, dict[str, Any]] = {"window": {"enum": list(cache.WINDOWS)}, "worker": {"type": "string"}}
_QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16}
_BEGINNING = {"prompt": "The capital of France is", "max_tokens": 16}
_TOP: dict[str, dict[str, Any]] = {"top": {"type": "integer", "minimum": 1, "maximum": cache.MAX_TOP}}

OPERATIONS = (
    Operation(
        "/v1/chat/completions",
        "post",
        "Answer a conversation.",
        chat_reply.ChatCompletion,
        _ANSWERS,
        body=chat.ChatFields,
        chunk=chat_reply.Chunk,
        examples={"whole": _QUESTION, "stream": _QUESTION | {"stream": True}},
    ),
    Operation(
        "/v1/completions",
        "post",
        "Continue one or several prompts.",
        completion_reply.Completion,
        _ANSWERS,
        body=completions.CompletionFields,
        chunk=completion_reply.Completion,
        examples={"whole": _BEGINNING, "stream": _BEGINNING | {"stream": True}},
    ),
    Operation(
        "/tokenize",
        "post",
        "Text or a conversation to tokens.",
        tokens.TokenizeReply,
        (*_BODY, KEY, MISSING, NOBODY),
        body=tokens.TokenizeFields,
    ),
    Operation(
        "/detokenize",
        "post",
        "Tokens to text.",
        tokens.DetokenizeReply,
        (*_BODY, KEY, MISSING),
        body=tokens.DetokenizeFields,
    ),
    Operation("/v1/models", "get", "The model that is served.", models.ModelList, (KEY,)),
    Operation("/v1/models/{model}", "get", "One model.", models.ModelCard, (KEY, MISSING)),
    Operation("/v1/cluster", "get", "Workers and their load.", ClusterStatus, (KEY,)),
    Operation(
        "/v1/cluster/drain",
        "post",
        "Let a worker finish and exit.",
        admin.DrainReply,
        (*_BODY, KEY, MISSING, NOBODY, LATE),
        body=admin.DrainFields,
    ),
    Operation(
        "/v1/cluster/ratio",
        "post",
        "Change how many workers have which role.",
        ratio.RatioReply,
        (*_BODY, KEY, BUSY, NOBODY, LATE),
        body=ratio.RatioFields,
    ),
    Operation("/v1/cache/stats", "get", "Hit rates.", cache.CacheStats, (WRONG, KEY, MISSING), query=_WINDOW),
    Operation("/v1/cache/prefixes", "get", "Shared prefixes.", cache.PrefixList, (WRONG, KEY), query=_TOP),
    Operation(
        "/v1/cache/lookup",
        "post",
        "How much of a prompt is cached.",
        cache.LookupReply,
        (*_BODY, KEY, NOBODY),
        body=cache.LookupFields,
    ),
    Operation("/v1/cache/reset", "post", "Forget all cached blocks.", cache.ResetReply, (KEY,)),
    Operation("/debug/kv", "get", "What every worker holds.", admin.KvDebug, (KEY,)),
    Operation("/health", "get", "200 while the process lives.", status.Status),
    Operation("/ready", "get", "200 when requests can be served.", status.Status, (NOBODY,)),
    Operation("/version", "get", "The version.", status.Version),
    Operation("/metrics", "get", "Prometheus metrics.", None),
    Operation("/openapi.json", "get", "This document.", None),
)


async def openapi(request: Request) -> Response:
    """Return the document."""
    return Response(msgspec.json.encode(document()), media_type="application/json")


def document() -> dict[str, Any]:
    """Return the OpenAPI document of the gateway."""
    types = {kind for operation in OPERATIONS for kind in (operation.body, operation.reply) if kind is not None}
    types |= {operation.chunk for operation in OPERATIONS if operation.chunk is not None} | {ErrorReply}
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Baton", "version": baton_version()},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _operation(operation: Operation) -> dict[str, Any]:
    responses = {"200": _answer(operation)} | {str(code): _error(code) for code in operation.errors}
    found: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in ("model",)
        if f"{{{name}}}" in operation.path
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]
    if parameters:
        found["parameters"] = parameters
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": _body(operation.body, operation.examples)}
    return found


def _body(kind: type[msgspec.Struct], examples: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    content = _json(kind)
    if examples:
        content["application/json"]["examples"] = {name: {"value": value} for name, value in examples.items()}
    return content


def _answer(operation: Operation) -> dict[str, Any]:
    if operation.reply is None:
        is_json = operation.path.endswith(".json")
        kind, schema = ("application/json", "object") if is_json else ("text/plain", "string")
        return {"description": "Done.", "content": {kind: {"schema": {"type": schema}}}}
    content = _json(operation.reply)
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk)}
    return {"description": "Done.", "content": content}


def _event(chunk: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the schema of one event: OpenAPI 3.1 has none for a stream, and those who read streams take it so."""
    payload = {"anyOf": [_schema(chunk), _schema(ErrorReply)]}
    text = {"type": "string", "contentMediaType": "application/json", "contentSchema": payload}
    data = {"anyOf": [{"const": _DONE}, text]}
    described = "One server-sent event: a chunk as JSON, or the error that ends the stream; the last one is [DONE]."
    return {"type": "object", "description": described, "properties": {"data": data}, "required": ["data"]}


def _error(code: int) -> dict[str, Any]:
    return {"description": _MEANINGS[code], "content": _json(ErrorReply)}


def _json(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"application/json": {"schema": _schema(kind)}}


def _schema(kind: type[msgspec.Struct]) -> dict[str, Any]:
    (schema,), _ = msgspec.json.schema_components((kind,), ref_template=_REF)
    return schema

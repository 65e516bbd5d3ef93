"""Errors as HTTP answers, all of one shape: ``{"error": {"message", "type", "param", "code"}}``."""

import math

import msgspec

from common.errors import BatonError, InternalError


class ErrorBody(msgspec.Struct, frozen=True):
    """What a client is told about an error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    """The body of every answer that is an error, and of the event that ends a stream with one."""

    error: ErrorBody


def error_reply(error: BatonError) -> bytes:
    """Return ``error`` as JSON."""
    code = getattr(error, "code", None)
    return msgspec.json.encode(ErrorReply(ErrorBody(error.message, error.type, error.param, code)))


def error_headers(error: BatonError) -> dict[str, str]:
    """Return the headers that tell a client when, and whether, to try again."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, InternalError):
        headers["x-should-retry"] = "false"
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return headers

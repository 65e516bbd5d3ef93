"""Reading a request's body within limits of size and time."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from common.errors import InvalidRequest, PayloadTooLarge
from gateway.errors import RequestTimeout
from gateway.http.client_gone import ClientGone

READ_TIMEOUT_S = 60.0
"""A client must have sent its body within this time."""


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Return the body of a JSON request.

    Raises InvalidRequest for another content type, PayloadTooLarge over ``max_bytes``, RequestTimeout when it takes too
    long, and ClientGone when the client leaves.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidRequest("Content-Type must be application/json")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await _read(request, max_bytes)
    except TimeoutError:
        raise RequestTimeout(f"the body did not arrive within {READ_TIMEOUT_S:g} s") from None
    except ClientDisconnect:
        raise ClientGone from None


async def _read(request: Request, max_bytes: int) -> bytes:
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    return b"".join(parts)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {max_bytes} bytes")

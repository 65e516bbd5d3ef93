"""Server-sent events as clients read them: ``data: <json>`` and a blank line, LF only, ``[DONE]`` at the end."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment; clients skip it, proxies see that the stream lives."""

DONE = b"data: [DONE]\n\n"
"""The last event of every stream; one that ends without it looks complete to some clients and is not."""

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(data: bytes) -> bytes:
    """Return one event; ``data`` is JSON on one line."""
    return b"data: " + data + b"\n\n"

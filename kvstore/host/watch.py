"""HTTP for whoever watches a worker: ``GET /health``, ``/ready`` and ``/metrics``.

Nothing else is served and no key is asked for, so the port belongs on a private network. It answers from the start of
the process on, also while the model loads.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from common.addresses import with_port
from common.errors import ConfigError

log = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 8192
_LIMIT_S = 5.0
"""A request and its answer take this long at most."""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: HTTPStatus
    content_type: str
    body: bytes

    def encode(self, *, with_body: bool) -> bytes:
        head = (
            f"HTTP/1.1 {self.status.value} {self.status.phrase}\r\nContent-Type: {self.content_type}\r\n"
            f"Content-Length: {len(self.body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode("latin-1") + (self.body if with_body else b"")


class WatchServer:
    """Lives from :meth:`start` to :meth:`stop`. ``unready`` says why the worker takes no work, "" when it does."""

    def __init__(self, registry: CollectorRegistry, unready: Callable[[], str]) -> None:
        self._registry = registry
        self._unready = unready
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Begin to answer and return the port; raises ConfigError when it is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_MAX_HEAD_BYTES)
        except OSError as error:
            raise ConfigError(f"cannot listen on --host {host} --metrics-port {port}: {error.strerror}") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        log.info("metrics on http://%s/metrics", with_port(host, bound))
        return bound

    def stop(self) -> None:
        """Take no more connections."""
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_LIMIT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._respond(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            log.debug("a watcher left, or did not ask in time")
        finally:
            writer.close()

    def _respond(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        if method not in ("GET", "HEAD"):
            return _json(HTTPStatus.METHOD_NOT_ALLOWED, "method not allowed").encode(with_body=True)
        path = rest.partition(" ")[0].partition("?")[0]
        return self._answer(path).encode(with_body=method == "GET")

    def _answer(self, path: str) -> _Answer:
        match path:
            case "/health":
                return _json(HTTPStatus.OK, "ok")
            case "/ready":
                reason = self._unready()
                return _json(HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK, reason or "ready")
            case "/metrics":
                return _Answer(HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(self._registry))
        return _json(HTTPStatus.NOT_FOUND, "there is nothing at this address")


def _json(status: HTTPStatus, word: str) -> _Answer:
    return _Answer(status, "application/json", f'{{"status":"{word}"}}\n'.encode())

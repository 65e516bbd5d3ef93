"""One HTTP/1.1 connection of the load generator: little work for each byte, and a clock reading for each read.

A plain asyncio protocol over httptools: the time of an event is taken when its bytes arrive, before they are parsed,
and nothing is awaited in between.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import SplitResult

import httptools

from common.errors import Unavailable


class Connection(asyncio.Protocol):
    """Serves one request at a time; may be used again when :attr:`is_reusable`."""

    def __init__(self) -> None:
        self.status = 0
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._on_body: Callable[[bytes, float], None] = _ignore
        self._done: asyncio.Future[None] | None = None
        self._at = 0.0

    async def request(self, head: bytes, body: bytes, on_body: Callable[[bytes, float], None]) -> None:
        """Send a request; ``on_body`` gets each part of the answer with its time. Raises Unavailable when it breaks."""
        assert self._transport is not None
        self.status = 0
        self.is_reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(head + body)
        await self._done

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    # ---- what asyncio calls ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take the time, then parse."""
        self._at = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(Unavailable(f"the answer is not HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what was not complete."""
        self.is_reusable = False
        self._end(Unavailable(f"the connection was lost{f': {error}' if error else ''}"))

    # ---- what httptools calls ----

    def on_headers_complete(self) -> None:
        """Note the status."""
        self.status = self._parser.get_status_code()

    def on_body(self, part: bytes) -> None:
        """Pass a part of the body on."""
        self._on_body(part, self._at)

    def on_message_complete(self) -> None:
        """The answer is complete."""
        self.is_reusable = self._parser.should_keep_alive()
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class Pool:
    """Connections to one server, kept for the next request. Owned by one run of the benchmark."""

    def __init__(self, url: SplitResult) -> None:
        self._host = url.hostname or "127.0.0.1"
        self._is_tls = url.scheme == "https"
        self._port = url.port or (443 if self._is_tls else 80)
        self._idle: list[Connection] = []

    async def take(self) -> Connection:
        """Return an idle connection or a new one; raises Unavailable."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, self._host, self._port, ssl=self._is_tls or None
            )
        except OSError as error:
            raise Unavailable(f"{self._host}:{self._port} cannot be reached: {error}") from error
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keep a connection for the next request, or close it."""
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close all that are idle."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _ignore(part: bytes, at: float) -> None:
    pass

"""A generation to an HTTP response, streamed or whole.

Nothing is sent before the first token, so that an error until then has its own status; only a stream that waits for
very long sends its headers early. A client that leaves ends the generation, whatever is awaited at that moment.
"""

import asyncio
from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.fields import CommonFields
from gateway.api.reply import ReplyWriter, best, gather
from gateway.api.usage import Usage, usage_of
from gateway.config import GatewayConfig
from gateway.http import sse
from gateway.http.client_gone import ClientGone, race
from gateway.http.errors import error_reply
from gateway.request.generation import Generation, IndexedPiece
from gateway.telemetry.metrics import Metrics

ROUTE_HEADER = "x-baton-route"


async def respond(
    generation: Generation,
    writer: ReplyWriter,
    fields: CommonFields,
    config: GatewayConfig,
    metrics: Metrics,
    receive: Receive,
) -> Response:
    """Start ``generation`` and return the response; raises what ended it before anything was sent, or ClientGone."""
    generation.start()
    try:
        if not fields.stream:
            response = await race(receive, _whole(generation, writer, fields))
            generation.close("the request has ended")
            return response
        first = await race(receive, _first_pieces(generation, config.headers_after_s))
        if generation.error is not None and not first:
            raise generation.error
        return EventStream(generation, writer, first, fields, config.keep_alive_s, metrics)
    except BaseException as error:
        generation.close("the request has ended")
        if isinstance(error, ClientGone):
            metrics.disconnects.inc()
        raise


async def _whole(generation: Generation, writer: ReplyWriter, fields: CommonFields) -> Response:
    pieces: list[list[IndexedPiece]] = [[] for _ in range(generation.num_answers)]
    while not generation.has_ended:
        for item in await generation.take():
            pieces[item.index].append(item)
    if generation.error is not None:
        raise generation.error
    answers = best([gather(items) for items in pieces], fields.num_samples, fields.num_choices)
    body = writer.whole(answers, usage_of(generation.usage()))
    return Response(body, headers=_route_headers(generation), media_type="application/json")


async def _first_pieces(generation: Generation, timeout_s: float) -> list[IndexedPiece]:
    """Wait for the first pieces; return none when the generation failed, or after ``timeout_s``."""
    try:
        async with asyncio.timeout(timeout_s):
            return await generation.take()
    except TimeoutError:
        return []


def _route_headers(generation: Generation) -> dict[str, str]:
    route = generation.route
    return {} if route is None else {ROUTE_HEADER: route.header()}


class EventStream(Response):
    """The streamed response. Closes the generation however it ends."""

    def __init__(
        self,
        generation: Generation,
        writer: ReplyWriter,
        first: Sequence[IndexedPiece],
        fields: CommonFields,
        keep_alive_s: float,
        metrics: Metrics,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(sse.HEADERS | _route_headers(generation))
        self._generation = generation
        self._writer = writer
        self._first = first
        options = fields.stream_options
        self._include_usage = options is not None and bool(options.include_usage)
        self._continuous_usage = options is not None and bool(options.continuous_usage_stats)
        self._keep_alive_s = keep_alive_s
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the headers, the events, and the end."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await race(receive, self._send_events(send))
        except ClientGone:
            self._metrics.disconnects.inc()
            raise
        finally:
            self._generation.close("the client is gone")

    async def _send_events(self, send: Send) -> None:
        keep_alive = _KeepAlive(self._generation, self._keep_alive_s)
        try:
            await _send(send, self._events(self._first))
            while not self._generation.has_ended:
                pieces = await self._generation.take()
                if pieces:
                    keep_alive.not_needed()
                    await _send(send, self._events(pieces))
                elif not self._generation.has_ended:
                    await _send(send, sse.KEEP_ALIVE)
        finally:
            keep_alive.cancel()
        await send({"type": "http.response.body", "body": self._end(), "more_body": False})

    def _events(self, pieces: Sequence[IndexedPiece]) -> bytes:
        usage = self._usage() if self._continuous_usage and pieces else None
        return b"".join([sse.event(chunk) for item in pieces for chunk in self._writer.chunks(item, usage)])

    def _end(self) -> bytes:
        error = self._generation.error
        if error is not None:
            return sse.event(error_reply(error)) + sse.DONE
        if self._include_usage:
            return sse.event(self._writer.usage_chunk(self._usage())) + sse.DONE
        return sse.DONE

    def _usage(self) -> Usage:
        return usage_of(self._generation.usage())


class _KeepAlive:
    """Wakes a generation's reader when nothing has come for ``interval_s``."""

    def __init__(self, generation: Generation, interval_s: float) -> None:
        self._generation = generation
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._quiet_since = self._loop.time()
        self._timer = self._loop.call_later(interval_s, self._look)

    def not_needed(self) -> None:
        """Something has come."""
        self._quiet_since = self._loop.time()

    def cancel(self) -> None:
        """Stop."""
        self._timer.cancel()

    def _look(self) -> None:
        due_at = self._quiet_since + self._interval_s
        now = self._loop.time()
        if now >= due_at:
            self._generation.interrupt()
            self._quiet_since, due_at = now, now + self._interval_s
        self._timer = self._loop.call_at(due_at, self._look)


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})

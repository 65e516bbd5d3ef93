"""gRPC without generated code: typed messages over generic handlers, errors mapped by :mod:`common.errors`.

A server takes a table of handlers and a cluster token that every call must carry. A client to one address keeps two
connections, so that a control call is never stuck behind block bytes. A handler that raises a BatonError answers with
that error, and the caller gets the same class raised; anything else is logged and answered as an internal error.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import msgspec

from common.errors import (
    BatonError,
    DeadlineExceeded,
    ErrorDetail,
    InternalError,
    Unauthorized,
    Unavailable,
    from_detail,
    to_detail,
)
from common.services import Method
from common.wire import MAX_MESSAGE_BYTES, decode, encode

log = logging.getLogger(__name__)

UnaryHandler = Callable[[Any], Awaitable[Any]]
StreamHandler = Callable[[Any], AsyncIterator[Any]]
BidiHandler = Callable[[AsyncIterator[Any]], AsyncIterator[Any]]

_TOKEN_KEY = "baton-token"
_DETAIL_KEY = "baton-error-bin"
_OPTIONS = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(frozen=True, slots=True)
class Handlers:
    """What a server answers, by method: one message in and out, one in and many out, or many in and out."""

    unary: dict[Method, UnaryHandler]
    stream: dict[Method, StreamHandler]
    bidi: dict[Method, BidiHandler]

    def merged(self, other: "Handlers") -> "Handlers":
        """Return a table with both; a method in both is served by ``other``."""
        return Handlers(self.unary | other.unary, self.stream | other.stream, self.bidi | other.bidi)


def _encoder(kind: Any) -> Callable[[Any], bytes] | None:
    return None if kind is bytes else encode


def _decoder(kind: Any) -> Callable[[bytes], Any] | None:
    return None if kind is bytes else lambda data: decode(data, kind)


class RpcServer:
    """A gRPC server. Owns the listening port; lives from :meth:`start` to :meth:`stop`."""

    def __init__(self, host: str, port: int, handlers: Handlers, token: str) -> None:
        self._host = host
        self._token = token.encode()
        self._server = grpc.aio.server(options=_OPTIONS)
        self._router = _Router(self._table(handlers))
        self._server.add_generic_rpc_handlers((self._router,))
        self.port = self._server.add_insecure_port(f"{host}:{port}")

    @property
    def address(self) -> str:
        """``host:port`` that clients connect to."""
        return f"{self._host}:{self.port}"

    async def start(self) -> None:
        """Begin to answer."""
        await self._server.start()

    def mount(self, handlers: Handlers) -> None:
        """Serve these methods from now on, and no others; calls that run already go on."""
        self._router.table = self._table(handlers)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones ``grace_s`` seconds, then cut them."""
        await self._server.stop(grace_s)

    def _table(self, handlers: Handlers) -> dict[str, grpc.RpcMethodHandler]:
        table: dict[str, grpc.RpcMethodHandler] = {}
        for method, unary in handlers.unary.items():
            table[method.path] = grpc.unary_unary_rpc_method_handler(
                self._guard_unary(method, unary), _decoder(method.request), _encoder(method.response)
            )
        for method, stream in handlers.stream.items():
            table[method.path] = grpc.unary_stream_rpc_method_handler(
                self._guard_stream(method, stream), _decoder(method.request), _encoder(method.response)
            )
        for method, bidi in handlers.bidi.items():
            table[method.path] = grpc.stream_stream_rpc_method_handler(
                self._guard_stream(method, bidi), _decoder(method.request), _encoder(method.response)
            )
        return table

    def _guard_unary(self, method: Method, handler: UnaryHandler) -> Any:
        async def serve(request: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                self._authorize(context)
                return await handler(request)
            except Exception as error:  # noqa: BLE001 - a process edge: every fault becomes an answer
                await _abort(context, error, method)

        return serve

    def _guard_stream(self, method: Method, handler: Callable[[Any], AsyncIterator[Any]]) -> Any:
        async def serve(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                self._authorize(context)
                async for item in handler(request):
                    yield item
            except Exception as error:  # noqa: BLE001 - a process edge: every fault becomes an answer
                await _abort(context, error, method)

        return serve

    def _authorize(self, context: grpc.aio.ServicerContext) -> None:
        sent = dict(context.invocation_metadata() or ()).get(_TOKEN_KEY, "")
        if not hmac.compare_digest(str(sent).encode(), self._token):
            raise Unauthorized("the cluster token is missing or wrong")


class _Router(grpc.GenericRpcHandler):  # type: ignore[misc]
    def __init__(self, table: dict[str, grpc.RpcMethodHandler]) -> None:
        self.table = table

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        return self.table.get(handler_call_details.method)


async def _abort(context: grpc.aio.ServicerContext, error: Exception, method: Method) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, BatonError):
        log.error("fault in %s", method.path, exc_info=error)
        error = InternalError("internal error")
    detail = encode(to_detail(error))
    await context.abort(error.grpc_status, error.message, ((_DETAIL_KEY, detail),))


class RpcClient:
    """Calls to one address. Owns its two connections; lives until :meth:`close`."""

    def __init__(self, address: str, token: str) -> None:
        self.address = address
        self._metadata = ((_TOKEN_KEY, token),)
        self._control = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._bulk = grpc.aio.insecure_channel(address, options=_OPTIONS)

    async def call(self, method: Method, request: msgspec.Struct, timeout_s: float) -> Any:
        """Return the answer to one control call; raises the peer's BatonError, Unavailable or DeadlineExceeded."""
        stub = self._control.unary_unary(method.path, _encoder(method.request), _decoder(method.response))
        try:
            return await stub(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _client_error(error) from error

    async def stream(self, method: Method, request: msgspec.Struct) -> AsyncGenerator[Any, None]:
        """Yield the elements of a bulk stream; raises as :meth:`call`. Closing the iterator cancels the call."""
        stub = self._bulk.unary_stream(method.path, _encoder(method.request), _decoder(method.response))
        call = stub(request, metadata=self._metadata)
        try:
            async for item in call:
                yield item
        except grpc.aio.AioRpcError as error:
            raise _client_error(error) from error
        finally:
            call.cancel()

    def open(self, method: Method) -> "Duplex":
        """Open a bidirectional stream on the control connection."""
        stub = self._control.stream_stream(method.path, _encoder(method.request), _decoder(method.response))
        return Duplex(stub(metadata=self._metadata))

    async def close(self) -> None:
        """Cut both connections."""
        await self._control.close()
        await self._bulk.close()


class Duplex:
    """One bidirectional stream, seen from the client. Any number of tasks may send."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._writing = asyncio.Lock()  # gRPC takes one write at a time

    async def send(self, message: msgspec.Struct) -> None:
        """Write one message; raises Unavailable when the stream has ended."""
        try:
            async with self._writing:
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise Unavailable("the stream to the worker has ended") from error

    async def receive(self) -> AsyncIterator[Any]:
        """Yield what the peer sends until it ends the stream; raises as :meth:`RpcClient.call`."""
        try:
            async for message in self._call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise _client_error(error) from error

    def cancel(self) -> None:
        """End the stream at once."""
        self._call.cancel()


def _client_error(error: grpc.aio.AioRpcError) -> BatonError:
    for key, value in error.trailing_metadata() or ():
        if key == _DETAIL_KEY:
            return from_detail(decode(bytes(value), ErrorDetail))
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the worker did not answer in time")
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unavailable("the worker cannot be reached")
    return InternalError(f"call failed: {error.code().name.lower()}")

"""gRPC without generated code: typed messages over generic handlers, errors mapped by :mod:`common.errors`.

Every message is sealed with a checksum, those of bidirectional streams are numbered too (:mod:`common.envelope`).

A server takes a table of handlers and a cluster token that every call must carry. A client to one address keeps two
connections, so that a control call is never stuck behind block bytes. A handler that raises a BatonError answers with
that error, and the caller gets the same class raised; anything else is logged and answered as an internal error.
"""

import asyncio
import hmac
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import msgspec

from common.addresses import with_port
from common.envelope import BEAT_S, SILENCE_S, StreamOpener, StreamSealer, seal, unseal, with_beats
from common.errors import (
    BatonError,
    CorruptFrame,
    DeadlineExceeded,
    ErrorDetail,
    InternalError,
    InvalidRequest,
    Unauthorized,
    Unavailable,
    from_detail,
    to_detail,
)
from common.services import Method
from common.tls import Tls
from common.wire import MAX_MESSAGE_BYTES, decode, encode

log = logging.getLogger(__name__)

UnaryHandler = Callable[[Any], Awaitable[Any]]
StreamHandler = Callable[[Any], AsyncIterator[Any]]
BidiHandler = Callable[[AsyncIterator[Any]], AsyncGenerator[Any, None]]

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


def _seal(message: msgspec.Struct) -> bytes:
    return seal(encode(message))


def _unseal(data: bytes, kind: Any) -> Any:
    return decode(unseal(data), kind)


class RpcServer:
    """A gRPC server. Owns the listening port; lives from :meth:`start` to :meth:`stop`."""

    def __init__(self, host: str, port: int, handlers: Handlers, token: str, tls: Tls | None = None) -> None:
        self._host = host
        self._token = token.encode()
        self._server = grpc.aio.server(options=_OPTIONS)
        self._router = _Router(self._table(handlers))
        self._server.add_generic_rpc_handlers((self._router,))
        self.port = self._bind(with_port(host, port), tls)

    def _bind(self, address: str, tls: Tls | None) -> int:
        if tls is None:
            return int(self._server.add_insecure_port(address))
        return int(self._server.add_secure_port(address, tls.server_credentials()))

    @property
    def address(self) -> str:
        """``host:port`` that clients connect to."""
        return with_port(self._host, self.port)

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
        """Return gRPC's table; messages are taken and given as bytes, so that a damaged one is an answer of ours."""
        return {
            **{
                method.path: grpc.unary_unary_rpc_method_handler(self._guard_unary(method, unary))
                for method, unary in handlers.unary.items()
            },
            **{
                method.path: grpc.unary_stream_rpc_method_handler(self._guard_stream(method, stream))
                for method, stream in handlers.stream.items()
            },
            **{
                method.path: grpc.stream_stream_rpc_method_handler(self._guard_bidi(method, bidi))
                for method, bidi in handlers.bidi.items()
            },
        }

    def _guard_unary(self, method: Method, handler: UnaryHandler) -> Any:
        async def serve(request: bytes, context: grpc.aio.ServicerContext) -> Any:
            try:
                self._authorize(context)
                return _seal(await handler(_unseal(request, method.request)))
            except Exception as error:  # noqa: BLE001 - a process edge: every fault becomes an answer
                await _abort(context, error, method)

        return serve

    def _guard_stream(self, method: Method, handler: StreamHandler) -> Any:
        async def serve(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                self._authorize(context)
                async for item in handler(_unseal(request, method.request)):
                    yield item
            except Exception as error:  # noqa: BLE001 - a process edge: every fault becomes an answer
                await _abort(context, error, method)

        return serve

    def _guard_bidi(self, method: Method, handler: BidiHandler) -> Any:
        async def serve(request: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            sealer = StreamSealer()
            try:
                self._authorize(context)
                async with aclosing(with_beats(handler(_opened(request, method.request)))) as messages:
                    async for message in messages:
                        yield sealer.seal(b"" if message is None else encode(message))
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


async def _opened(elements: AsyncIterator[bytes], kind: Any) -> AsyncIterator[Any]:
    opener = StreamOpener()
    async for element in elements:
        if message := opener.open(element):
            yield decode(message, kind)


async def _abort(context: grpc.aio.ServicerContext, error: Exception, method: Method) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, BatonError):
        log.error("fault in %s", method.path, exc_info=error)
        error = InternalError("internal error")
    detail = _seal(to_detail(error))
    await context.abort(error.grpc_status, error.message, ((_DETAIL_KEY, detail),))


def _channel(address: str, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=_OPTIONS)


class RpcClient:
    """Calls to one address. Owns its two connections; lives until :meth:`close`."""

    def __init__(self, address: str, token: str, tls: Tls | None = None) -> None:
        self.address = address
        self._metadata = ((_TOKEN_KEY, token),)
        self._control = _channel(address, tls)
        self._bulk = _channel(address, tls)

    async def call(self, method: Method, request: msgspec.Struct, timeout_s: float) -> Any:
        """Return the answer to one control call; raises the peer's BatonError, Unavailable or DeadlineExceeded."""
        stub = self._control.unary_unary(method.path)
        try:
            return _answer(await stub(_seal(request), timeout=timeout_s, metadata=self._metadata), method)
        except grpc.aio.AioRpcError as error:
            raise _client_error(error) from error

    async def stream(self, method: Method, request: msgspec.Struct) -> AsyncGenerator[Any, None]:
        """Yield the elements of a bulk stream, bytes with checksums of their own; raises as :meth:`call`.

        Closing the iterator cancels the call.
        """
        stub = self._bulk.unary_stream(method.path)
        call = stub(_seal(request), metadata=self._metadata)
        try:
            async for item in call:
                yield item
        except grpc.aio.AioRpcError as error:
            raise _client_error(error) from error
        finally:
            call.cancel()

    def open(self, method: Method) -> "Duplex":
        """Open a bidirectional stream on the control connection."""
        return Duplex(self._control.stream_stream(method.path)(metadata=self._metadata), method)

    async def close(self) -> None:
        """Cut both connections."""
        await self._control.close()
        await self._bulk.close()


class Duplex:
    """One bidirectional stream, seen from the client. Any number of tasks may send, one receives."""

    def __init__(self, call: Any, method: Method) -> None:
        self._call = call
        self._method = method
        self._sealer = StreamSealer()
        self._writing = asyncio.Lock()  # gRPC takes one write at a time

    async def send(self, message: msgspec.Struct) -> None:
        """Write one message; raises Unavailable when the stream has ended."""
        await self._write(encode(message))

    async def receive(self) -> AsyncGenerator[Any, None]:
        """Yield what the peer sends until it ends the stream, and beat meanwhile.

        Raises as :meth:`RpcClient.call`, CorruptFrame when something was damaged or lost on the way, and Unavailable
        when the peer is silent.
        """
        opener = StreamOpener()
        beating = asyncio.create_task(self._beat())
        try:
            while (element := await self._read()) is not None:
                if message := opener.open(element):
                    yield _answer_message(message, self._method)
        finally:
            beating.cancel()

    def cancel(self) -> None:
        """End the stream at once."""
        self._call.cancel()

    async def _read(self) -> bytes | None:
        try:
            async with asyncio.timeout(SILENCE_S):
                element = await self._call.read()
        except TimeoutError:
            raise Unavailable(f"the worker has said nothing for {SILENCE_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _client_error(error) from error
        return None if element is grpc.aio.EOF else element

    async def _write(self, message: bytes) -> None:
        try:
            async with self._writing:
                await self._call.write(self._sealer.seal(message))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise Unavailable("the stream to the worker has ended") from error

    async def _beat(self) -> None:
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                await self._write(b"")
        except Unavailable:
            return  # the reader sees the stream's end too, and says so


def _answer(data: bytes, method: Method) -> Any:
    return _answer_message(unseal(data), method)


def _answer_message(message: bytes, method: Method) -> Any:
    """Return what a peer answered; raises CorruptFrame when it is not an answer of ``method``."""
    try:
        return decode(message, method.response)
    except InvalidRequest as error:
        raise CorruptFrame(f"the worker's answer cannot be read: {error.message}") from error


def _client_error(error: grpc.aio.AioRpcError) -> BatonError:
    """Return what a failed call means. A peer of ours always says why; without that the connection is at fault."""
    for key, value in error.trailing_metadata() or ():
        if key == _DETAIL_KEY:
            try:
                return from_detail(_unseal(bytes(value), ErrorDetail))
            except (CorruptFrame, InvalidRequest):
                break
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded("the worker did not answer in time")
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return Unavailable("the worker cannot be reached")
    return Unavailable(f"the call to the worker failed: {error.code().name.lower()}")

"""One stream to one life of one decode worker, shared by all sequences that this gateway has there.

Life: connect (the worker's Hello must name the epoch that the registry named), serve, and when the stream ends tell
every sequence at once and connect again, until the registry no longer knows this life of the worker. What arrives is
handed on synchronously, in order; what is sent goes through one writer.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from common.errors import BatonError, InternalError, StaleEpoch, Unavailable, from_detail
from common.ids import Epoch, RequestId, WorkerId
from common.logprobs import TokenLogprobs
from common.messages import (
    Abort,
    Accepted,
    Hello,
    HelloReply,
    Plan,
    Preempted,
    PromptLogprobs,
    Refused,
    SequenceOutput,
    SessionDown,
    SessionUp,
    Started,
    Submit,
    Tokens,
    WorkerRecord,
)
from common.rpc import Duplex, RpcClient
from common.services import HELLO, SESSION

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 2.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0


class Sink(Protocol):
    """What a request is told about itself. Called on the event loop; must not block."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is expected of the worker."""

    def accepted(self, cached_tokens: int) -> None:
        """The worker owns the sequence and holds its first ``cached_tokens`` tokens."""

    def refused(self, error: BatonError) -> None:
        """The worker does not take the sequence; nothing follows."""

    def started(self, cached_tokens: int) -> None:
        """Work on the prompt has begun; the first ``cached_tokens`` tokens need no work."""

    def prompt_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """The prompt has been computed, and is so likely."""

    def output(self, output: SequenceOutput) -> None:
        """A step brought one of the samples something."""

    def preempted(self, cached_tokens: int) -> None:
        """The worker has to compute what the sequence has so far again, but for its first ``cached_tokens`` tokens."""

    def lost(self, error: BatonError) -> None:
        """The stream has ended, or the worker is to be left; nothing follows."""


@dataclass(slots=True)
class _Outgoing:
    message: SessionUp
    written: asyncio.Future[None] | None = None


class DecodeSession:
    """Owns ``client``, the stream and the table of sequences on it. ``on_change`` is called when it goes up or down."""

    def __init__(
        self,
        record: WorkerRecord,
        client: RpcClient,
        name: WorkerId,
        epoch: Epoch,
        on_change: Callable[[], None],
    ) -> None:
        self.worker_id = record.worker_id
        self.is_up = False
        self._record = record
        self._hello = Hello(name, epoch, record.fingerprint)
        self._client = client
        self._on_change = on_change
        self._sinks: dict[RequestId, Sink] = {}
        self._outgoing: deque[_Outgoing] = deque()
        self._has_outgoing = asyncio.Event()

    # ---- what sequences ask ----

    def submit(self, submit: Submit, sink: Sink) -> None:
        """Offer a sequence; the answer comes to ``sink``. Raises Unavailable when the stream is down."""
        if not self.is_up:
            raise Unavailable("the decode worker is not connected")
        self._sinks[submit.request_id] = sink
        self._send(submit)

    async def plan(self, plan: Plan) -> None:
        """Send ``plan``; return when it has been written, or dropped with the stream."""
        if self.is_up:
            written = asyncio.get_running_loop().create_future()
            self._send(plan, written)
            await written

    def abort_sample(self, request_id: RequestId, index: int, reason: str) -> None:
        """Give one of several samples up; the others go on."""
        if self.is_up:
            self._send(Abort(request_id, reason, (index,)))

    def abort(self, request_id: RequestId, reason: str) -> None:
        """Give a request up; its sink hears nothing more. Does nothing when it has ended."""
        if self._sinks.pop(request_id, None) is not None and self.is_up:
            self._send(Abort(request_id, reason))

    def leave(self, error: BatonError) -> None:
        """Give up all sequences, since the worker makes no progress; each is told ``error``."""
        for request_id, sink in list(self._sinks.items()):
            self.abort(request_id, error.message)
            sink.lost(error)

    # ---- life ----

    async def run(self) -> None:
        """Keep the stream up until cancelled."""
        backoff_s = MIN_BACKOFF_S
        try:
            while True:
                try:
                    await self._check_identity()
                    backoff_s = MIN_BACKOFF_S
                    await self._serve(self._client.open(SESSION))
                    error: BatonError = Unavailable("the decode worker ended the session")
                except BatonError as caught:
                    error = caught
                except Exception:
                    log.exception("session with %s: fault", self.worker_id)
                    error = Unavailable("the session with the decode worker failed")
                if self.is_up:
                    log.warning("session with %s has ended: %s", self.worker_id, error.message)
                self._went_down(error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
        finally:
            self._went_down(Unavailable("the decode worker is gone"))
            await self._client.close()

    async def _check_identity(self) -> None:
        reply: HelloReply = await self._client.call(HELLO, self._hello, HELLO_TIMEOUT_S)
        if (reply.worker_id, reply.epoch) != (self._record.worker_id, self._record.epoch):
            raise StaleEpoch("another worker, or another life of this one, answers at its address")

    async def _serve(self, stream: Duplex) -> None:
        self.is_up = True
        log.info("session with %s, epoch %d", self.worker_id, self._record.epoch)
        self._on_change()
        writer = asyncio.create_task(self._write(stream))
        try:
            async for message in stream.receive():
                self._dispatch(message)
        finally:
            stream.cancel()
            writer.cancel()
            await asyncio.wait((writer,))

    def _went_down(self, error: BatonError) -> None:
        self.is_up = False
        for outgoing in self._outgoing:
            _finish(outgoing.written)
        self._outgoing.clear()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.lost(error)
        self._on_change()

    # ---- out ----

    def _send(self, message: SessionUp, written: asyncio.Future[None] | None = None) -> None:
        self._outgoing.append(_Outgoing(message, written))
        self._has_outgoing.set()

    async def _write(self, stream: Duplex) -> None:
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            while self._outgoing:
                outgoing = self._outgoing.popleft()
                try:
                    await stream.send(outgoing.message)
                except Unavailable:
                    return  # the reader sees the stream's end too, and says so
                finally:
                    _finish(outgoing.written)

    # ---- in ----

    def _dispatch(self, message: SessionDown) -> None:
        match message:
            case Tokens():
                for output in message.outputs:
                    self._output(output)
            case Accepted():
                self._tell(message.request_id, lambda sink: sink.accepted(message.cached_tokens))
            case Started():
                self._tell(message.request_id, lambda sink: sink.started(message.cached_tokens))
            case Preempted():
                self._tell(message.request_id, lambda sink: sink.preempted(message.cached_tokens))
            case PromptLogprobs():
                self._tell(message.request_id, lambda sink: sink.prompt_logprobs(message.logprobs))
            case Refused():
                sink = self._sinks.pop(message.request_id, None)
                if sink is not None:
                    sink.refused(from_detail(message.error))

    def _output(self, output: SequenceOutput) -> None:
        sink = self._sinks.get(output.request_id)
        if sink is None:  # aborted, and the worker did not know yet
            return
        self._tell_one(output.request_id, sink, lambda sink: sink.output(output))
        if sink.has_ended:
            self._sinks.pop(output.request_id, None)

    def _tell(self, request_id: RequestId, call: Callable[[Sink], None]) -> None:
        sink = self._sinks.get(request_id)
        if sink is not None:
            self._tell_one(request_id, sink, call)

    def _tell_one(self, request_id: RequestId, sink: Sink, call: Callable[[Sink], None]) -> None:
        """Let a fault in one sequence's handling end that sequence and no other."""
        try:
            call(sink)
        except Exception as fault:  # of one sequence: it must not end the session
            error = fault if isinstance(fault, BatonError) else InternalError("internal error")
            if error is not fault:
                log.error("%s: fault while handling output", request_id, exc_info=fault)
            self.abort(request_id, error.message)
            sink.lost(error)


def _finish(written: asyncio.Future[None] | None) -> None:
    if written is not None and not written.done():
        written.set_result(None)

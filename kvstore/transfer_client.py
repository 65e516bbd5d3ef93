"""The destination of hand-overs: pulls a transfer's blocks into this worker's own, as they are computed.

A pull gives back what can be believed: the leading tokens whose KV is in place and checked, the next token if it came,
and the error that cut it short. Between an offer and its ``done`` or ``cancel`` the transfer's lease is kept alive.
Knows nothing of pools and sequences.
"""

import asyncio
import dataclasses
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

from common.errors import BatonError, CorruptFrame, DeadlineExceeded, Unavailable
from common.ids import BlockId, TransferId
from common.messages import End, Handover, HelloReply, KvFrame, Offer, Pull
from common.rpc import RpcClient
from common.services import PULL
from common.wire import decode_pull_item
from kvstore.block_mover import BlockMover
from kvstore.incoming import Incoming
from kvstore.lease_keeper import CALL_TIMEOUT_S, RENEW_S, LeaseKeeper
from kvstore.peers import PeerSet
from kvstore.storage import KvStorage
from kvstore.transports.inline import InlineReader
from kvstore.transports.pairs import Pair, Pairs
from kvstore.transports.transport import Reader, TransportFailed
from kvstore.transports.transports import GRPC_ONLY, Transports

IDLE_S = 30.0
"""A stream that brings nothing for this long is given up."""


@dataclasses.dataclass(frozen=True, slots=True)
class PullOutcome:
    """How a pull ended; ``error`` is None when the source sent everything."""

    num_tokens: int
    """Leading tokens whose KV is in place and valid, those the puller had included."""
    handover: Handover | None
    error: BatonError | None


@dataclasses.dataclass(slots=True)
class ClientCounters:
    """What a transfer client has done since its start."""

    pulls: int = 0
    pulls_failed: int = 0
    frames_received: int = 0
    bytes_received: int = 0
    """Bytes of blocks that were checked and are in place."""
    bytes_by_grpc: int = 0
    """Those of them that came in the frames."""
    bytes_by_shm: int = 0
    bytes_by_nixl: int = 0
    fallbacks: int = 0
    """Pulls that went on by gRPC because their transport had failed."""
    corrupt_frames: int = 0
    """Streams that were cut because something in them was wrong or missing."""

    def count_frame(self, transport: str, num_bytes: int) -> None:
        """Count one frame whose bytes are in place."""
        self.frames_received += 1
        self.bytes_received += num_bytes
        name = f"bytes_by_{transport}"
        setattr(self, name, getattr(self, name) + num_bytes)


class _Running:
    """One pull that runs in the current task."""

    __slots__ = ("_task", "stopped")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self.stopped = False

    def stop(self) -> None:
        """Interrupt what the pull waits for, once."""
        if not self.stopped:
            self.stopped = True
            self._task.cancel()

    def is_task_cancelled(self) -> bool:
        """Say, after an interruption, whether somebody cancelled the whole task; forgets our own :meth:`stop`."""
        return (self._task.uncancel() if self.stopped else self._task.cancelling()) > 0


class TransferClient:
    """All pulls of one worker. Owned by its host; used on the event loop while :meth:`run` does."""

    def __init__(
        self,
        storage: KvStorage,
        block_size: int,
        identity: HelloReply,
        peers: PeerSet,
        *,
        renew_s: float = RENEW_S,
        idle_s: float = IDLE_S,
        transports: Transports = GRPC_ONLY,
        mover: BlockMover | None = None,
        on_pulled: Callable[[float, bool], None] = lambda elapsed_s, is_complete: None,
    ) -> None:
        self._on_pulled = on_pulled
        self.counters = ClientCounters()
        self.leases = LeaseKeeper(peers, renew_s)
        """Keeps the leases of offers that were accepted."""
        self._storage = storage
        self._block_size = block_size
        self._peers = peers
        self._idle_s = idle_s
        self._pairs = Pairs(identity, transports, InlineReader(storage, mover or BlockMover.for_device(storage.device)))
        self._running: defaultdict[TransferId, list[_Running]] = defaultdict(list)
        self._stopped: set[TransferId] = set()

    def expect(self, offer: Offer) -> None:
        """Keep the lease of an accepted offer alive although its pull begins later; :meth:`pull` does so too."""
        self.leases.expect(offer)

    def done(self, offer: Offer) -> None:
        """Tell the source, soon and with others, that the transfer was received. Safe to call again."""
        self._stopped.discard(offer.transfer_id)
        self.leases.done(offer)

    def cancel(self, offer: Offer, reason: str) -> None:
        """Tell the source, soon and with others, to drop the transfer. Safe in any state and to call again."""
        self._stopped.discard(offer.transfer_id)
        self.leases.cancel(offer, reason)

    def stop(self, offer: Offer) -> None:
        """End the offer's pull: it soon returns what it has so far, with Unavailable as its error.

        A pull that begins only after this returns at once. The offer stays until :meth:`done` or :meth:`cancel`.
        """
        self._stopped.add(offer.transfer_id)
        for running in self._running.get(offer.transfer_id, ()):
            running.stop()

    async def wait_told(self) -> None:
        """Wait until every ``done`` and ``cancel`` so far was delivered or given up; for a shutdown."""
        await self.leases.wait_told()

    async def run(self) -> None:
        """Renew leases and deliver what sources must be told, until cancelled."""
        await self.leases.run()

    async def pull(
        self,
        offer: Offer,
        have_tokens: int,
        block_ids: Sequence[BlockId],
        on_handover: Callable[[Handover], None],
        *,
        is_loan: bool = False,
    ) -> PullOutcome:
        """Fill ``block_ids``, the puller's table for the whole prompt, behind its first ``have_tokens`` tokens.

        ``on_handover`` is called as soon as the next token comes, maybe before the last blocks; a loan fills all of
        ``block_ids`` and has none. Never raises for a
        fault of the transfer. Once it has returned, or raised CancelledError, nothing is written any more, so the
        blocks may be reused at once. The caller then calls :meth:`done` or :meth:`cancel`.
        """
        self.expect(offer)
        self.counters.pulls += 1
        incoming = Incoming(
            offer.transfer_id,
            have_tokens,
            block_ids,
            self._block_size,
            self._storage.layout.block_bytes,
            is_loan=is_loan,
        )
        began = time.monotonic()
        try:
            with self._stoppable(offer.transfer_id):
                await self._receive(offer, incoming, on_handover)
        except BatonError as error:
            self._on_pulled(time.monotonic() - began, False)
            self.counters.pulls_failed += 1
            self.counters.corrupt_frames += isinstance(error, CorruptFrame)
            return PullOutcome(incoming.num_tokens, incoming.handover, error)
        self._on_pulled(time.monotonic() - began, True)
        return PullOutcome(incoming.num_tokens, incoming.handover, None)

    @contextmanager
    def _stoppable(self, transfer_id: TransferId) -> Iterator[None]:
        """Turn what cancels the calls inside, but not their task, into an error: :meth:`stop`, or a closed channel."""
        if transfer_id in self._stopped:
            raise Unavailable("the pull was stopped")
        running = _Running()
        self._running[transfer_id].append(running)
        try:
            yield
        except asyncio.CancelledError:
            if running.is_task_cancelled():
                raise
            reason = "the pull was stopped" if running.stopped else "the connection to the blocks' source was closed"
            raise Unavailable(reason) from None
        finally:
            self._running[transfer_id].remove(running)
            if not self._running[transfer_id]:
                del self._running[transfer_id]

    async def _receive(self, offer: Offer, incoming: Incoming, on_handover: Callable[[Handover], None]) -> None:
        with self._peers.use(offer.address) as client:
            pair = await self._pairs.greet(client, offer, min(CALL_TIMEOUT_S, self._idle_s))
            try:
                await self._read(client, offer, incoming, on_handover, pair)
            except TransportFailed as failure:
                self.counters.fallbacks += 1
                self._pairs.fall_back(pair, str(failure))
                incoming.begin_again()
                await self._read(client, offer, incoming, on_handover, pair)
        if not incoming.is_complete:
            raise CorruptFrame("the stream ended early")

    async def _read(
        self,
        client: RpcClient,
        offer: Offer,
        incoming: Incoming,
        on_handover: Callable[[Handover], None],
        pair: Pair,
    ) -> None:
        """Take one stream to its end, or to what is wrong with it."""
        reader = pair.reader
        request = Pull(offer.transfer_id, offer.epoch, incoming.num_tokens, reader.name)
        async with aclosing(client.stream(PULL, request)) as stream:
            while (data := await self._next(stream)) is not None:
                match decode_pull_item(data):
                    case Handover() as handover:
                        if incoming.take_handover(handover):
                            on_handover(handover)
                    case KvFrame() as frame:
                        await self._take(frame, incoming, reader, pair)
                    case End() as end:
                        incoming.take_end(end)

    async def _next(self, stream: AsyncIterator[bytes]) -> bytes | None:
        try:
            async with asyncio.timeout(self._idle_s):
                return await anext(stream, None)
        except TimeoutError:
            raise DeadlineExceeded(f"the source of the blocks sent nothing for {self._idle_s:g} s") from None

    async def _take(self, frame: KvFrame, incoming: Incoming, reader: Reader, pair: Pair) -> None:
        block_ids = incoming.check_frame(frame)
        try:
            await reader.fill(frame, block_ids)
        except CorruptFrame as error:
            self._pairs.fall_back(pair, error.message)  # not for this pull: the source's own bytes may be wrong by now
            raise
        incoming.take_frame(frame)
        self.counters.count_frame(reader.name, len(block_ids) * self._storage.layout.block_bytes)

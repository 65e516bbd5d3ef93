"""The source of hand-overs: lets other workers pull the blocks of prompts that are computed here.

A transfer lives from :meth:`TransferServer.open` until its puller's Done or Cancel, the end of its lease, or its
engine's ``close`` or ``fail``; ``on_release`` is called exactly once for each, and then its blocks may be reused: a
stream that still runs sends nothing more of them. Late, repeated and unknown messages are counted, never an error that
ends anything. Knows nothing of pools and prompts, nor of how other transports than gRPC read what frames announce.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from common.errors import BatonError, ConfigError, FingerprintMismatch, InvalidRequest, StaleEpoch, UnknownTransfer
from common.ids import BlockId, Epoch, TransferId
from common.messages import (
    GRPC,
    Ack,
    Cancel,
    Done,
    End,
    Hello,
    HelloReply,
    KvFrame,
    LeaseReport,
    Pull,
    Renew,
    RenewReply,
)
from common.rpc import Handlers
from common.services import CANCEL, DONE, HELLO, PULL, RENEW
from common.wire import encode_frame, encode_pull_item, payload_checksum
from kvstore.block_mover import BlockMover
from kvstore.fingerprint import require_same
from kvstore.frame_size import MAX_BLOCK_BYTES, blocks_in_frame
from kvstore.lease import LeaseTable
from kvstore.outgoing import FrameSpan, Outgoing, ReleaseReason, fresh
from kvstore.storage import KvStorage
from kvstore.tombstones import Tombstones

TOMBSTONE_S = 60.0
"""An ended transfer, or a cancel that came early, is remembered this long."""

SHOWN_ID_LENGTH = 11
"""Characters of a transfer's id that are shown: enough to tell them apart, too few to pull with."""

_MAX_TOMBSTONES = 10_000
_MAX_REAP_INTERVAL_S = 1.0


@dataclasses.dataclass(slots=True)
class ServerCounters:
    """What a transfer server has done since its start."""

    opened: int = 0
    hellos: int = 0
    pulls: int = 0
    frames_sent: int = 0
    bytes_sent: int = 0
    """Bytes of blocks, in the frames or to be read otherwise."""
    done: int = 0
    cancelled: int = 0
    expired: int = 0
    closed: int = 0
    failed: int = 0
    unknown: int = 0
    """Done, Cancel, Renew and Pull about a transfer that is not here (any more)."""
    stale_epoch: int = 0
    """Messages to an earlier life of this worker."""
    fingerprint_mismatch: int = 0

    def count_release(self, reason: ReleaseReason) -> None:
        """Count one ended transfer under its reason."""
        setattr(self, reason.value, getattr(self, reason.value) + 1)


class TransferServer:
    """All transfers that leave one worker. Owns them, their leases and the memory of ended ones; on the event loop."""

    def __init__(
        self,
        storage: KvStorage,
        block_size: int,
        identity: HelloReply,
        leases: LeaseTable,
        on_release: Callable[[TransferId, ReleaseReason], None],
        clock: Callable[[], float],
        *,
        mover: BlockMover | None = None,
    ) -> None:
        if storage.layout.block_bytes > MAX_BLOCK_BYTES:
            raise ConfigError(
                f"a KV block of {storage.layout.block_bytes} bytes is over the frame limit of {MAX_BLOCK_BYTES}: "
                "use a smaller block size"
            )
        self.counters = ServerCounters()
        self._storage = storage
        self._block_size = block_size
        self._identity = identity
        self._leases = leases
        self._on_release = on_release
        self._clock = clock
        self._max_blocks = blocks_in_frame(storage.layout.block_bytes)
        self._transports = {GRPC, *(offer.name for offer in identity.transports)}
        self._mover = mover or BlockMover.for_device(storage.device)
        self._transfers: dict[TransferId, Outgoing] = {}
        self._tombstones = Tombstones(TOMBSTONE_S, _MAX_TOMBSTONES)

    def open(self, transfer_id: TransferId, block_ids: Sequence[BlockId]) -> Outgoing:
        """Begin a transfer of these blocks, which cover the whole prompt, and grant its lease.

        The caller holds the blocks until ``on_release``. When a Cancel came first, the transfer that is returned has
        already ended (``error`` is set) and ``on_release`` follows as soon as the event loop runs, not in this call.
        Raises ValueError when the transfer is open.
        """
        stone = self._tombstones.find(transfer_id, self._clock())
        if stone is not None and stone.reason is ReleaseReason.CANCELLED:
            return self._stillborn(transfer_id, stone.error)
        self._tombstones.forget(transfer_id)
        generation = self._leases.grant(transfer_id, block_ids, self._clock())
        outgoing = Outgoing(transfer_id, generation, block_ids, self._block_size, self._failed)
        self._transfers[transfer_id] = outgoing
        self.counters.opened += 1
        return outgoing

    def close(self, transfer_id: TransferId) -> None:
        """End a transfer from this side; an ended or unknown one is ignored."""
        self._release(transfer_id, None, ReleaseReason.CLOSED, UnknownTransfer("the transfer was closed at its source"))

    def close_all(self) -> None:
        """End every transfer that is left from this side."""
        for transfer_id in list(self._transfers):
            self.close(transfer_id)

    def reap(self) -> None:
        """Release the transfers whose leases have run out."""
        for transfer_id in self._leases.expired(self._clock()):
            error = UnknownTransfer("the transfer's lease ran out before it was renewed")
            self._release(transfer_id, None, ReleaseReason.EXPIRED, error)

    def report(self) -> tuple[LeaseReport, ...]:
        """Return the leases that stand, for people."""
        return tuple(
            LeaseReport(transfer_id[:SHOWN_ID_LENGTH], num_blocks, round(remaining_s, 3))
            for transfer_id, num_blocks, remaining_s in self._leases.remaining(self._clock())
        )

    async def run(self) -> None:
        """Reap on a timer until cancelled."""
        interval_s = min(_MAX_REAP_INTERVAL_S, self._leases.lease_s / 4)
        while True:
            await asyncio.sleep(interval_s)
            self.reap()

    def handlers(self) -> Handlers:
        """Return what every owner of blocks serves."""
        return Handlers(
            unary={HELLO: self._hello, RENEW: self._renew, DONE: self._done, CANCEL: self._cancel},
            stream={PULL: self._pull},
            bidi={},
        )

    # ---- messages ----

    async def _hello(self, hello: Hello) -> HelloReply:
        self.counters.hellos += 1
        try:
            require_same(self._identity, hello)
        except FingerprintMismatch:
            self.counters.fingerprint_mismatch += 1
            raise
        return self._identity

    async def _renew(self, renew: Renew) -> RenewReply:
        self._check_epoch(renew.epoch)
        unknown = self._leases.renew(renew.transfer_ids, self._clock())
        self.counters.unknown += len(unknown)
        return RenewReply(unknown)

    async def _done(self, done: Done) -> Ack:
        self._check_epoch(done.epoch)
        for lease in done.leases:
            error = UnknownTransfer("the transfer is done")
            if not self._release(lease.transfer_id, lease.generation, ReleaseReason.DONE, error):
                self.counters.unknown += 1
        return Ack()

    async def _cancel(self, cancel: Cancel) -> Ack:
        self._check_epoch(cancel.epoch)
        for transfer_id in cancel.transfer_ids:
            error = UnknownTransfer("the transfer was cancelled")
            if not self._release(transfer_id, None, ReleaseReason.CANCELLED, error):
                self.counters.unknown += 1
                self._tombstones.bury(transfer_id, ReleaseReason.CANCELLED, error, self._clock())
        return Ack()

    async def _pull(self, pull: Pull) -> AsyncIterator[bytes]:
        self._check_epoch(pull.epoch)
        if pull.transport not in self._transports:
            raise InvalidRequest(f"the worker has no transport {pull.transport}", param="transport")
        outgoing = self._find(pull.transfer_id)
        self._leases.renew((pull.transfer_id,), self._clock())
        self.counters.pulls += 1
        num_sent, seq, told = pull.have_tokens, 0, False
        while True:
            outgoing.raise_if_ended()
            outgoing.check_start(num_sent)
            if outgoing.handover is not None and not told:
                told = True
                yield encode_pull_item(outgoing.handover)
            elif outgoing.is_served(num_sent):
                break
            elif (span := outgoing.next_span(num_sent, self._max_blocks)) is None:
                await outgoing.wait_changed()
            else:
                make = self._frame if pull.transport == GRPC else self._announcement
                frame = await self._mover.run(partial(make, outgoing.transfer_id, seq, span))
                outgoing.raise_if_ended()  # released while it was read: the bytes may be somebody else's
                if outgoing.handover is not None and not told:
                    told = True
                    yield encode_pull_item(outgoing.handover)
                num_sent, seq = span.token_end, seq + 1
                self._count_frame(span)
                yield frame
        yield encode_pull_item(End(outgoing.transfer_id, seq))

    def _frame(self, transfer_id: TransferId, seq: int, span: FrameSpan) -> bytes:
        parts = self._storage.parts(span.block_ids)
        return encode_frame(transfer_id, seq, span.token_start, span.token_end, span.block_ids, parts)

    def _announcement(self, transfer_id: TransferId, seq: int, span: FrameSpan) -> bytes:
        checksum = payload_checksum(self._storage.parts(span.block_ids))
        return encode_pull_item(
            KvFrame(transfer_id, seq, span.token_start, span.token_end, span.block_ids, checksum, None)
        )

    def _count_frame(self, span: FrameSpan) -> None:
        self.counters.frames_sent += 1
        self.counters.bytes_sent += len(span.block_ids) * self._storage.layout.block_bytes

    # ---- ends ----

    def _stillborn(self, transfer_id: TransferId, error: BatonError) -> Outgoing:
        outgoing = Outgoing(transfer_id, 0, (), self._block_size, self._failed)
        outgoing.end(error)
        self.counters.count_release(ReleaseReason.CANCELLED)
        asyncio.get_running_loop().call_soon(self._on_release, transfer_id, ReleaseReason.CANCELLED)
        return outgoing

    def _failed(self, outgoing: Outgoing, error: BatonError) -> None:
        self._release(outgoing.transfer_id, outgoing.generation, ReleaseReason.FAILED, error)

    def _release(
        self, transfer_id: TransferId, generation: int | None, reason: ReleaseReason, error: BatonError
    ) -> bool:
        if not self._leases.release(transfer_id, generation):
            return False
        outgoing = self._transfers.pop(transfer_id)
        outgoing.end(error)
        self._tombstones.bury(transfer_id, reason, error, self._clock())
        self.counters.count_release(reason)
        self._on_release(transfer_id, reason)
        return True

    # ---- checks ----

    def _check_epoch(self, epoch: Epoch) -> None:
        if epoch != self._identity.epoch:
            self.counters.stale_epoch += 1
            raise StaleEpoch("the worker has restarted since")

    def _find(self, transfer_id: TransferId) -> Outgoing:
        outgoing = self._transfers.get(transfer_id)
        if outgoing is not None:
            return outgoing
        self.counters.unknown += 1
        stone = self._tombstones.find(transfer_id, self._clock())
        raise fresh(stone.error) if stone is not None else UnknownTransfer("the transfer is not known here")

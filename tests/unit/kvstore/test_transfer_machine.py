"""Random lives of transfers between two pools, under a virtual clock, with faults on every message and frame.

The source's pool, its real transfer server and leases; the destination's pool and its real check of what comes in.
Frames are sent in any order, lost, repeated and damaged; Done, Cancel and Renew come late, twice, or for another
generation; the clock jumps; the engine fails or closes. After each step: the books of both pools balance, a transfer is
released exactly once, and every token that the destination counts as valid holds the source's bytes.
"""

from collections.abc import Coroutine
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import BatonError, CorruptFrame
from common.ids import BlockId, Epoch, TransferId
from common.messages import Cancel, Done, KvFrame, Lease, Renew
from common.services import CANCEL, DONE, RENEW
from common.wire import decode_pull_item, encode_frame
from kvstore.block_pool import BlockPool
from kvstore.incoming import Incoming, check_bytes
from kvstore.lease import LeaseTable
from kvstore.outgoing import Outgoing, ReleaseReason
from kvstore.transfer_server import TransferServer
from tests.support.transfer import BLOCK, LAYOUT, NUM_BLOCKS, Clock, handover, identity, new_storage

EPOCH = Epoch(1)
LEASE_S = 10.0
FRAME_BLOCKS = 2
picks = st.integers(0, 1000)


class Transfer:
    """One prompt on its way."""

    def __init__(self, transfer_id: TransferId, num_tokens: int, blocks: list[BlockId], outgoing: Outgoing) -> None:
        self.transfer_id = transfer_id
        self.num_tokens = num_tokens
        self.source_blocks = blocks
        self.outgoing = outgoing
        self.num_computed = 0
        self.num_sent = 0
        self.seq = 0
        self.frames: list[bytes] = []
        self.releases: list[ReleaseReason] = []
        self.destination_blocks: list[BlockId] = []
        self.incoming: Incoming | None = None
        self.is_broken = False
        """Something wrong came in, so the pull is over; its valid prefix stays."""


class TransferMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.leases = LeaseTable(LEASE_S)
        self.source, self.destination = BlockPool(NUM_BLOCKS, BLOCK), BlockPool(NUM_BLOCKS, BLOCK)
        self.source_storage, self.destination_storage = new_storage(), new_storage()
        self.server = TransferServer(
            self.source_storage, BLOCK, identity("p0", EPOCH), self.leases, self.released, self.clock
        )
        self.calls = self.server.handlers().unary
        self.transfers: list[Transfer] = []
        self.num_opened = 0

    def released(self, transfer_id: TransferId, reason: ReleaseReason) -> None:
        (transfer,) = [one for one in self.transfers if one.transfer_id == transfer_id]
        transfer.releases.append(reason)
        self.source.release(transfer.source_blocks)

    def pick(self, number: int) -> Transfer:
        return self.transfers[number % len(self.transfers)]

    # ---- the source's engine ----

    @precondition(lambda self: len(self.transfers) < 6)
    @rule(num_tokens=st.integers(1, 4 * BLOCK + 1))
    def open(self, num_tokens: int) -> None:
        self.num_opened += 1
        transfer_id = TransferId(f"kv-{self.num_opened}")
        blocks = self.source.allocate(-(-num_tokens // BLOCK))
        outgoing = self.server.open(transfer_id, tuple(blocks))
        transfer = Transfer(transfer_id, num_tokens, blocks, outgoing)
        transfer.destination_blocks = self.destination.allocate(len(blocks))
        transfer.incoming = Incoming(transfer_id, 0, transfer.destination_blocks, BLOCK, LAYOUT.block_bytes)
        self.transfers.append(transfer)

    @precondition(lambda self: self.transfers)
    @rule(number=picks, more=st.integers(1, 2 * BLOCK))
    def compute(self, number: int, more: int) -> None:
        transfer = self.pick(number)
        transfer.num_computed = min(transfer.num_tokens, transfer.num_computed + more)
        transfer.outgoing.advance(transfer.num_computed)
        if transfer.num_computed == transfer.num_tokens and transfer.outgoing.handover is None:
            transfer.outgoing.hand_over(handover(transfer.transfer_id, transfer.num_tokens))

    @precondition(lambda self: self.transfers)
    @rule(number=picks, closes=st.booleans())
    def give_up(self, number: int, closes: bool) -> None:
        transfer = self.pick(number)
        if closes:
            self.server.close(transfer.transfer_id)
        else:
            transfer.outgoing.fail(CorruptFrame("the step failed"))

    # ---- the stream ----

    @precondition(lambda self: self.transfers)
    @rule(number=picks)
    def send(self, number: int) -> None:
        transfer = self.pick(number)
        outgoing = transfer.outgoing
        if outgoing.error is not None:
            return
        span = outgoing.next_span(transfer.num_sent, FRAME_BLOCKS)
        if span is not None:
            parts = self.source_storage.parts(span.block_ids)
            transfer.frames.append(
                encode_frame(
                    transfer.transfer_id, transfer.seq, span.token_start, span.token_end, span.block_ids, parts
                )
            )
            transfer.num_sent, transfer.seq = span.token_end, transfer.seq + 1

    @precondition(lambda self: any(transfer.frames for transfer in self.transfers))
    @rule(
        number=picks,
        frame=picks,
        fate=st.sampled_from(["arrives", "arrives", "is lost", "comes twice", "is damaged"]),
        at=picks,
    )
    def receive(self, number: int, frame: int, fate: str, at: int) -> None:
        transfer = self.pick(number)
        if not transfer.frames:
            return
        index = frame % len(transfer.frames) if fate != "arrives" else 0
        data = transfer.frames[index] if fate == "comes twice" else transfer.frames.pop(index)
        if fate == "is lost":
            return
        if fate == "is damaged":
            broken = bytearray(data)
            broken[at % len(data)] ^= 4
            data = bytes(broken)
        self.take(transfer, data)

    def take(self, transfer: Transfer, data: bytes) -> None:
        incoming = transfer.incoming
        assert incoming is not None
        if transfer.is_broken:
            return
        try:
            if transfer.outgoing.handover is not None and incoming.handover is None:
                incoming.take_handover(transfer.outgoing.handover)
            item = decode_pull_item(data)
            assert isinstance(item, KvFrame)
            block_ids = incoming.check_frame(item)
            check_bytes(item, (item.payload,))
            self.destination_storage.write(block_ids, memoryview(item.payload))
            incoming.take_frame(item)
        except CorruptFrame:
            transfer.is_broken = True

    # ---- control ----

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a handler, which never waits."""
        try:
            coroutine.send(None)
        except StopIteration as stopped:
            return stopped.value
        except BatonError:
            return None
        raise AssertionError("the handler waits")

    @precondition(lambda self: self.transfers)
    @rule(number=picks, generation=st.integers(-1, 1), epoch=st.sampled_from([1, 1, 1, 2]))
    def done(self, number: int, generation: int, epoch: int) -> None:
        transfer = self.pick(number)
        lease = Lease(transfer.transfer_id, transfer.outgoing.generation + generation)
        num_before = len(transfer.releases)
        self.call(self.calls[DONE](Done(Epoch(epoch), (lease, lease))))
        if generation != 0 or epoch != EPOCH:
            assert len(transfer.releases) == num_before

    @precondition(lambda self: self.transfers)
    @rule(number=picks)
    def cancel(self, number: int) -> None:
        transfer_id = self.pick(number).transfer_id
        self.call(self.calls[CANCEL](Cancel(EPOCH, (transfer_id, transfer_id, TransferId("kv-unknown")))))
        assert transfer_id not in self.leases

    @precondition(lambda self: self.transfers)
    @rule(number=picks)
    def renew(self, number: int) -> None:
        transfer = self.pick(number)
        reply = self.call(self.calls[RENEW](Renew(EPOCH, (transfer.transfer_id,))))
        assert bool(reply.unknown) == bool(transfer.releases)

    @rule(seconds=st.sampled_from([0.1, 3.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        self.server.reap()

    @precondition(lambda self: any(transfer.releases for transfer in self.transfers))
    @rule()
    def forget(self) -> None:
        """The destination gives back what it pulled of transfers that have ended."""
        for transfer in [transfer for transfer in self.transfers if transfer.releases]:
            self.destination.release(transfer.destination_blocks)
            self.transfers.remove(transfer)

    # ---- what always holds ----

    @invariant()
    def books_balance(self) -> None:
        lent = [transfer.source_blocks for transfer in self.transfers if not transfer.releases]
        self.source.check_integrity(lent)
        assert sorted(map(sorted, self.leases.holders())) == sorted(map(sorted, lent))
        self.destination.check_integrity(transfer.destination_blocks for transfer in self.transfers)

    @invariant()
    def each_is_released_at_most_once(self) -> None:
        for transfer in self.transfers:
            assert len(transfer.releases) == (transfer.transfer_id not in self.leases)

    @invariant()
    def what_counts_as_valid_is_the_sources(self) -> None:
        for transfer in self.transfers:
            assert transfer.incoming is not None
            num_blocks = -(-transfer.incoming.num_tokens // BLOCK)
            for ours, theirs in list(zip(transfer.destination_blocks, transfer.source_blocks, strict=True))[
                :num_blocks
            ]:
                assert self.destination_storage.read([ours]) == self.source_storage.read([theirs])

    def teardown(self) -> None:
        """Nobody renews any more: the clock alone brings everything back."""
        self.clock.now += 2 * LEASE_S
        self.server.reap()
        self.source.check_integrity([])
        assert len(self.leases) == 0


TestTransferMachine = TransferMachine.TestCase
TestTransferMachine.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)

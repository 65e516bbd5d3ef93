"""Hand-overs that go wrong: the puller keeps a valid prefix, says why, and nothing else is touched."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
import torch

from common.errors import (
    BatonError,
    CorruptFrame,
    DeadlineExceeded,
    FingerprintMismatch,
    InternalError,
    StaleEpoch,
    Unauthorized,
    Unavailable,
    UnknownTransfer,
)
from common.ids import BlockId, Epoch, TransferId
from common.messages import End, KvFrame, Pull
from common.wire import decode_pull_item, encode_frame, encode_pull_item
from kvstore.block_mover import BlockMover
from kvstore.outgoing import ReleaseReason
from kvstore.peers import PeerSet
from kvstore.storage import KvStorage
from kvstore.transfer_client import TransferClient
from kvstore.transports.choices import TransportChoice
from tests.support.transfer import (
    BLOCK,
    FINGERPRINT,
    LAYOUT,
    NUM_BLOCKS,
    PATIENCE_S,
    TRANSPORTS,
    Destination,
    Script,
    blocks,
    destination,
    handover,
    identity,
    make_offer,
    new_storage,
    scripted_source,
    source,
    until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> TransportChoice:
    return request.param


ID = TransferId("t")
FRAMES = 6
ALL = blocks(*range(FRAMES))


def frame(storage: KvStorage, seq: int) -> bytes:
    """One block a frame, from the same block of ``storage``."""
    block_ids = [BlockId(seq)]
    return encode_frame(ID, seq, seq * BLOCK, (seq + 1) * BLOCK, block_ids, storage.parts(block_ids))


def good_stream(storage: KvStorage) -> list[bytes]:
    """The handover, one frame a block, and the end."""
    return [
        encode_pull_item(handover("t", FRAMES * BLOCK)),
        *(frame(storage, seq) for seq in range(FRAMES)),
        encode_pull_item(End(ID, FRAMES)),
    ]


def play(items: list[bytes]) -> Script:
    async def script(_: Pull) -> AsyncIterator[bytes]:
        for item in items:
            yield item

    return script


def with_bad_payload(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def with_other_token(data: bytes) -> bytes:
    position = data.index(bytes([42]))  # the token's id, see tests.support.transfer
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


def rewritten(data: bytes, **changes: object) -> bytes:
    item = decode_pull_item(data)
    assert isinstance(item, KvFrame)
    return encode_pull_item(msgspec.structs.replace(item, **changes))


def without(stream: list[bytes], at: int) -> list[bytes]:
    return stream[:at] + stream[at + 1 :]


def swapped(stream: list[bytes], at: int) -> list[bytes]:
    return [*stream[:at], stream[at + 1], stream[at], *stream[at + 2 :]]


def replaced(stream: list[bytes], at: int, data: bytes) -> list[bytes]:
    return [*stream[:at], data, *stream[at + 1 :]]


def assert_prefix(target: Destination, origin: KvStorage, before: bytes, num_blocks: int) -> None:
    """The first blocks are the source's, the others are as they were."""
    size = origin.layout.block_bytes
    assert target.storage.read(ALL) == origin.read(ALL)[: num_blocks * size] + before[num_blocks * size :]


@pytest.mark.parametrize(
    ("damage", "num_valid"),
    [
        (lambda stream: replaced(stream, 4, with_bad_payload(stream[4])), 3),
        (lambda stream: replaced(stream, 4, stream[4][:-1]), 3),
        (lambda stream: replaced(stream, 4, b""), 3),
        (lambda stream: replaced(stream, 4, b"junk"), 3),
        (lambda stream: replaced(stream, 4, rewritten(stream[4], transfer_id="other")), 3),
        (lambda stream: replaced(stream, 4, rewritten(stream[4], token_end=4 * BLOCK - 1)), 3),
        (lambda stream: replaced(stream, 4, rewritten(stream[4], block_ids=())), 3),
        (lambda stream: without(stream, 4), 3),
        (lambda stream: swapped(stream, 4), 3),
        (lambda stream: [*stream[:4], stream[3], *stream[4:]], 3),
        (lambda stream: stream[:4], 3),
        (lambda stream: stream[:-1], 6),
        (lambda stream: stream[1:], 6),
        (lambda stream: [*stream[:-1], encode_pull_item(End(ID, FRAMES - 1))], 6),
        (lambda stream: [*stream, stream[-2]], 6),
        (lambda stream: replaced(stream, 0, with_other_token(stream[0])), 0),
        (lambda stream: [], 0),
    ],
    ids=[
        "flipped bit in the payload",
        "cut frame",
        "empty frame",
        "no frame at all",
        "frame of another transfer",
        "token range inside a block",
        "blocks missing from the range",
        "dropped frame",
        "reordered frames",
        "repeated frame",
        "short stream",
        "no end",
        "no handover",
        "end with another count",
        "frame after the end",
        "flipped bit in the handover",
        "nothing",
    ],
)
async def test_a_damaged_stream_leaves_its_valid_prefix_and_an_error(damage, num_valid: int):
    storage = new_storage()
    async with scripted_source(play(damage(good_stream(storage)))) as address, destination() as target:
        before = target.storage.read(ALL)
        outcome = await target.pull(make_offer("t", address), 0, ALL)
        assert isinstance(outcome.error, CorruptFrame)
        assert outcome.num_tokens == num_valid * BLOCK
        assert_prefix(target, storage, before, num_valid)
        assert target.client.counters.corrupt_frames == target.client.counters.pulls_failed == 1


async def test_the_undamaged_stream_is_fine():
    storage = new_storage()
    async with scripted_source(play(good_stream(storage))) as address, destination() as target:
        outcome = await target.pull(make_offer("t", address), 0, ALL)
        assert (outcome.num_tokens, outcome.error) == (FRAMES * BLOCK, None)
        assert_prefix(target, storage, b"", FRAMES)


async def test_what_was_lost_can_be_pulled_again_behind_the_valid_prefix(transport: TransportChoice):
    storage, good = new_storage(), good_stream(new_storage())
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, ALL)
        outgoing.hand_over(handover("t", FRAMES * BLOCK))
        good = [encode_pull_item(handover("t", FRAMES * BLOCK)), *(frame(origin.storage, seq) for seq in range(3))]
        async with scripted_source(play(good)) as address:
            first = await target.pull(make_offer("t", address), 0, ALL)
        assert first.num_tokens == 3 * BLOCK
        second = await target.pull(origin.offer("t"), first.num_tokens, ALL)
        assert (second.num_tokens, second.error) == (FRAMES * BLOCK, None)
        assert_prefix(target, origin.storage, b"", FRAMES)
        assert origin.server.counters.bytes_sent == 3 * storage.layout.block_bytes


async def test_a_frozen_source_does_not_hold_a_puller_for_ever():
    storage = new_storage()

    async def script(_: Pull) -> AsyncIterator[bytes]:
        yield frame(storage, 0)
        await asyncio.Event().wait()

    async with scripted_source(script) as address, destination(idle_s=0.2) as target:
        before = target.storage.read(ALL)
        outcome = await target.pull(make_offer("t", address), 0, ALL)
        assert isinstance(outcome.error, DeadlineExceeded)
        assert outcome.num_tokens == BLOCK
        assert_prefix(target, storage, before, 1)


async def test_a_source_that_goes_away_in_mid_stream_leaves_the_prefix():
    storage, reached = new_storage(), asyncio.Event()

    async def script(_: Pull) -> AsyncIterator[bytes]:
        yield frame(storage, 0)
        yield frame(storage, 1)
        reached.set()
        await asyncio.Event().wait()

    async with destination() as target:
        before = target.storage.read(ALL)
        async with scripted_source(script) as address:
            pulling = asyncio.create_task(target.pull(make_offer("t", address), 0, ALL))
            await reached.wait()
            await until(lambda: target.client.counters.frames_received == 2)
        outcome = await pulling
        assert isinstance(outcome.error, Unavailable)
        assert outcome.num_tokens == 2 * BLOCK
        assert_prefix(target, storage, before, 2)


async def test_a_source_that_is_not_there_is_an_error_and_nothing_more():
    async with scripted_source(play([])) as address:
        pass
    async with destination() as target:
        outcome = await target.pull(make_offer("t", address), 0, ALL)
        assert isinstance(outcome.error, Unavailable)
        assert outcome.num_tokens == 0
        assert outcome.handover is None


async def test_a_closed_connection_is_an_error_not_a_cancellation(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        origin.server.open(ID, ALL)
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await until(lambda: origin.server.counters.pulls == 1)
        await target.peers.close()
        outcome = await pulling
        assert isinstance(outcome.error, Unavailable)


async def test_a_source_that_fails_tells_the_puller_why(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, ALL)
        outgoing.advance(BLOCK)
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await until(lambda: target.client.counters.frames_received == 1)
        outgoing.fail(InternalError("the step failed"))
        assert origin.released == [(ID, ReleaseReason.FAILED)]
        outcome = await pulling
        assert isinstance(outcome.error, InternalError)
        assert outcome.error.message == "the step failed"
        assert outcome.num_tokens == BLOCK
        late = await target.pull(origin.offer("t"), BLOCK, ALL)
        assert late.error is not None
        assert late.error.message == "the step failed"


async def test_an_unknown_transfer_is_refused_and_counted(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outcome = await target.pull(origin.offer("nobody"), 0, ALL)
        assert isinstance(outcome.error, UnknownTransfer)
        assert origin.server.counters.unknown == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("model", "other"), ("kv_dtype", "float32"), ("block_size", 99), ("tokenizer", "other"), ("protocol", 99)],
)
async def test_a_pair_that_does_not_fit_is_refused_by_the_name_of_the_field(
    field: str, value: object, transport: TransportChoice
):
    other = msgspec.structs.replace(FINGERPRINT, **{field: value})
    async with source(transport=transport, fingerprint=other) as origin, destination(transport=transport) as target:
        origin.server.open(ID, ALL)
        outcome = await target.pull(origin.offer("t"), 0, ALL)
        assert isinstance(outcome.error, FingerprintMismatch)
        assert f"differ in {field}" in outcome.error.message
        assert origin.server.counters.fingerprint_mismatch == 1
        assert origin.server.counters.pulls == 0


async def test_the_puller_checks_the_fingerprint_too():
    other = msgspec.structs.replace(FINGERPRINT, layout="other")
    async with scripted_source(play([]), fingerprint=other) as address, destination() as target:
        outcome = await target.pull(make_offer("t", address), 0, ALL)
        assert isinstance(outcome.error, FingerprintMismatch)
        assert "differ in layout" in outcome.error.message


async def test_a_pair_greets_once_in_a_life_of_the_source(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        for number in range(3):
            origin.server.open(TransferId(str(number)), ALL).hand_over(handover(str(number), BLOCK))
            assert (await target.pull(origin.offer(str(number)), 0, ALL)).error is None
        assert origin.server.counters.hellos == 1


async def test_other_pairs_go_on_beside_one_that_does_not_fit(transport: TransportChoice):
    other = msgspec.structs.replace(FINGERPRINT, model="other")
    async with (
        source(transport=transport) as origin,
        destination(transport=transport) as target,
        destination(transport=transport, fingerprint=other) as stranger,
    ):
        origin.server.open(ID, ALL).hand_over(handover("t", BLOCK))
        assert isinstance((await stranger.pull(origin.offer("t"), 0, ALL)).error, FingerprintMismatch)
        assert (await target.pull(origin.offer("t"), 0, ALL)).error is None


async def test_messages_to_an_earlier_life_of_the_source_are_dropped_and_counted(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        origin.server.open(ID, ALL).hand_over(handover("t", BLOCK))
        assert (await target.pull(origin.offer("t"), 0, ALL)).error is None  # greeted
        stale = make_offer("t", origin.address, Epoch(99))
        assert isinstance((await target.pull(stale, 0, ALL)).error, StaleEpoch)
        await target.say_done(stale)
        await target.say_cancel(stale)
        assert origin.released == []
        assert origin.server.counters.stale_epoch == 2


async def test_a_source_that_restarts_on_its_address_works_at_once(transport: TransportChoice):
    async with destination(transport=transport) as target:
        async with source(transport=transport) as origin:
            origin.server.open(ID, ALL).hand_over(handover("t", BLOCK))
            assert (await target.pull(origin.offer("t"), 0, ALL)).error is None
            port = int(origin.address.split(":")[1])
        async with source(transport=transport, port=port, epoch=Epoch(7)) as reborn:
            assert isinstance((await target.pull(origin.offer("t"), 0, ALL)).error, StaleEpoch | Unavailable)
            reborn.server.open(ID, ALL).hand_over(handover("t", BLOCK))
            outcome = await target.pull(reborn.offer("t"), 0, ALL)
            while isinstance(outcome.error, Unavailable):  # gRPC backs off before it connects again
                outcome = await target.pull(reborn.offer("t"), 0, ALL)
            assert outcome.error is None
            assert target.storage.read(ALL[:1]) == reborn.storage.read(ALL[:1])


async def test_without_the_token_nobody_reads_blocks():
    async with source() as origin:
        origin.server.open(ID, ALL)
        peers = PeerSet("wrong")
        client = TransferClient(new_storage(), BLOCK, identity("d0", Epoch(2)), peers)
        outcome = await client.pull(origin.offer("t"), 0, ALL, lambda _: None)
        assert isinstance(outcome.error, Unauthorized)
        await peers.close()


async def test_a_cancelled_pull_never_writes_to_a_block_that_was_reused():
    storage, go_on, sent = new_storage(), asyncio.Event(), asyncio.Event()

    async def script(_: Pull) -> AsyncIterator[bytes]:
        yield frame(storage, 0)
        try:
            await go_on.wait()
        finally:
            sent.set()
        yield frame(storage, 1)

    async with scripted_source(script) as address, destination() as target:
        pulling = asyncio.create_task(target.pull(make_offer("t", address), 0, ALL))
        await until(lambda: target.client.counters.frames_received == 1)
        pulling.cancel()
        await asyncio.wait([pulling])
        assert pulling.cancelled()
        theirs = new_storage().read(ALL)
        target.storage.write(ALL, memoryview(theirs))  # another request has the blocks now
        go_on.set()
        await sent.wait()
        assert (await target.pull(make_offer("t", address), 0, blocks(60))).error is not None  # the wire still works
        assert target.storage.read(ALL) == theirs
        assert target.client.counters.frames_received == 1 + 1


async def test_a_stopped_pull_returns_its_valid_prefix(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, ALL)
        outgoing.advance(2 * BLOCK)
        before = target.storage.read(ALL)
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await until(lambda: target.client.counters.frames_received == 1)
        target.client.stop(origin.offer("t"))
        target.client.stop(origin.offer("t"))  # again changes nothing
        target.client.cancel(origin.offer("t"), "computed here")
        outcome = await pulling
        assert isinstance(outcome.error, Unavailable)
        assert outcome.num_tokens == 2 * BLOCK
        assert_prefix(target, origin.storage, before, 2)
        await target.told()
        assert origin.released == [(ID, ReleaseReason.CANCELLED)]


async def test_a_pull_that_was_stopped_before_it_began_returns_at_once(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        origin.server.open(ID, ALL).hand_over(handover("t", FRAMES * BLOCK))
        pulling = asyncio.create_task(target.pull(origin.offer("t"), BLOCK, ALL))
        target.client.stop(origin.offer("t"))
        outcome = await pulling
        assert isinstance(outcome.error, Unavailable)
        assert outcome.num_tokens == BLOCK
        assert origin.server.counters.pulls == 0


async def test_a_pull_that_is_stopped_and_cancelled_is_cancelled(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        origin.server.open(ID, ALL)
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await until(lambda: origin.server.counters.pulls == 1)
        target.client.stop(origin.offer("t"))
        pulling.cancel()
        await asyncio.wait([pulling])
        assert pulling.cancelled()


class SlowStorage(KvStorage):
    """Blocks on a device that is slow to copy: reads and writes wait until they may end."""

    def __init__(self) -> None:
        super().__init__(LAYOUT, NUM_BLOCKS, torch.device("cpu"))
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def parts(self, block_ids: Sequence[BlockId]) -> list[memoryview]:
        self.wait()
        return super().parts(block_ids)

    def write(self, block_ids: Sequence[BlockId], payload: memoryview) -> None:
        self.wait()
        super().write(block_ids, payload)

    def wait(self) -> None:
        self.begun.set()
        assert self.may_end.wait(PATIENCE_S)


async def test_bytes_of_a_block_that_was_reused_while_they_were_read_are_not_sent():
    storage = SlowStorage()
    async with source(storage=storage, mover=BlockMover(in_thread=True)) as origin, destination() as target:
        before = target.storage.read(ALL)
        origin.server.open(ID, ALL).advance(FRAMES * BLOCK)
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await asyncio.to_thread(storage.begun.wait, PATIENCE_S)
        origin.server.close(ID)  # from here on the blocks are somebody else's
        storage.may_end.set()
        outcome = await pulling
        assert isinstance(outcome.error, UnknownTransfer)
        assert outcome.num_tokens == 0
        assert origin.server.counters.frames_sent == 0
        assert target.storage.read(ALL) == before


async def test_the_token_overtakes_a_block_that_is_slow_to_read():
    storage = SlowStorage()
    async with source(storage=storage, mover=BlockMover(in_thread=True)) as origin, destination() as target:
        outgoing = origin.server.open(ID, ALL)
        outgoing.advance(BLOCK)
        frames_before_token: list[int] = []
        pulling = asyncio.create_task(
            target.pull(
                origin.offer("t"), 0, ALL, lambda _: frames_before_token.append(target.client.counters.frames_received)
            )
        )
        await asyncio.to_thread(storage.begun.wait, PATIENCE_S)
        outgoing.hand_over(handover("t", FRAMES * BLOCK))
        storage.may_end.set()
        assert (await pulling).error is None
        assert frames_before_token == [0]
        assert target.storage.read(ALL) == origin.storage.read(ALL)


async def test_a_pull_that_is_cancelled_in_mid_write_ends_when_the_write_has():
    storage = SlowStorage()
    async with source() as origin, destination(storage=storage, mover=BlockMover(in_thread=True)) as target:
        origin.server.open(ID, ALL).hand_over(handover("t", FRAMES * BLOCK))
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await asyncio.to_thread(storage.begun.wait, PATIENCE_S)
        pulling.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        assert not pulling.done()  # so nobody reuses the blocks yet
        storage.may_end.set()
        await asyncio.wait([pulling])
        assert pulling.cancelled()
        assert storage.read(ALL) == origin.storage.read(ALL)


@pytest.mark.parametrize("num_turns", range(0, 60, 3))
async def test_a_pull_cancelled_at_any_moment_writes_nothing_afterwards(num_turns: int, transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, ALL)
        outgoing.hand_over(handover("t", FRAMES * BLOCK))
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        for _ in range(num_turns):
            await asyncio.sleep(0)
        pulling.cancel()
        await asyncio.wait([pulling])
        theirs = new_storage().read(ALL)
        target.storage.write(ALL, memoryview(theirs))
        origin.server.open(TransferId("other"), blocks(9)).hand_over(handover("other", 1))
        outcome = await target.pull(origin.offer("other"), 0, blocks(60))
        assert outcome.error is None
        assert target.storage.read(ALL) == theirs


async def test_a_fault_in_one_transfer_leaves_the_others_alone(transport: TransportChoice):
    storage = new_storage()
    bad = play(replaced(good_stream(storage), 3, b"junk"))
    async with (
        source(transport=transport) as origin,
        scripted_source(bad) as address,
        destination(transport=transport) as target,
    ):
        async with asyncio.TaskGroup() as group:
            broken = group.create_task(target.pull(make_offer("t", address), 0, ALL))
            others = []
            for number in range(10):
                outgoing = origin.server.open(TransferId(str(number)), blocks(number, number + 20))
                outgoing.hand_over(handover(str(number), 2 * BLOCK))
                table = blocks(10 + 2 * number, 11 + 2 * number)
                others.append(group.create_task(target.pull(origin.offer(str(number)), 0, table)))
        assert isinstance(broken.result().error, BatonError)
        for number, task in enumerate(others):
            assert task.result().error is None
            table = blocks(10 + 2 * number, 11 + 2 * number)
            assert target.storage.read(table) == origin.storage.read(blocks(number, number + 20))

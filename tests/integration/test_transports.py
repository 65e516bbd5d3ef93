"""How the bytes of a hand-over come: the way that was asked for where it works, else gRPC; and never wrong ones."""

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from common.errors import CorruptFrame, InvalidRequest, Unavailable, UnknownTransfer
from common.ids import TransferId
from common.messages import KvFrame, Pull
from common.services import PULL
from common.wire import encode_pull_item, payload_checksum
from kvstore.storage import KvStorage
from kvstore.transports.choices import TransportChoice
from tests.support.transfer import (
    BIG_LAYOUT,
    BLOCK,
    TRANSPORTS,
    blocks,
    destination,
    handover,
    lent_storage,
    make_offer,
    new_storage,
    scripted_source,
    source,
    until,
)
from tests.support.transports import gated, source_process

pytestmark = pytest.mark.anyio

ID = TransferId("t")
ALL = blocks(*range(6))
BY_ID = [one for one in TRANSPORTS if one != "grpc"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_all_bytes_come_as_was_asked(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        origin.server.open(ID, ALL).hand_over(handover("t", 6 * BLOCK))
        assert (await target.pull(origin.offer("t"), 0, ALL)).error is None
        counters = target.client.counters
        assert (
            getattr(counters, f"bytes_by_{transport}")
            == counters.bytes_received
            == 6 * origin.storage.layout.block_bytes
        )
        assert counters.fallbacks == 0


async def test_auto_is_shared_memory_between_cpus():
    async with source(transport="auto") as origin, destination(transport="auto") as target:
        origin.server.open(ID, ALL).hand_over(handover("t", 6 * BLOCK))
        assert (await target.pull(origin.offer("t"), 0, ALL)).error is None
        assert target.client.counters.bytes_by_shm == 6 * origin.storage.layout.block_bytes


@pytest.mark.parametrize(("theirs", "ours"), [("grpc", "shm"), ("shm", "grpc"), ("grpc", "grpc")])
async def test_a_pair_that_has_nothing_else_in_common_uses_grpc_and_says_so_once(
    theirs: TransportChoice, ours: TransportChoice, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    async with source(transport=theirs) as origin, destination(transport=ours) as target:
        for number in range(3):
            origin.server.open(TransferId(str(number)), ALL).hand_over(handover(str(number), 6 * BLOCK))
            assert (await target.pull(origin.offer(str(number)), 0, ALL)).error is None
        assert target.client.counters.bytes_by_grpc == target.client.counters.bytes_received > 0
        assert target.storage.read(ALL) == origin.storage.read(ALL)
    reason = " (shm: the source does not have it)" if ours == "shm" else ""
    said = [record.getMessage() for record in caplog.records if record.name == "kvstore.transports.pairs"]
    assert said == [f"blocks of p0 come by grpc{reason}"]


async def test_a_transport_that_the_source_has_not_offered_is_refused():
    async with source(transport="shm") as origin, destination() as target:
        origin.server.open(ID, ALL)
        with target.peers.use(origin.address) as client:
            with pytest.raises(InvalidRequest, match="no transport nixl"):
                await anext(client.stream(PULL, Pull(ID, origin.epoch, 0, "nixl")))
        assert origin.server.counters.pulls == 0


@pytest.mark.parametrize("transport", BY_ID)
@pytest.mark.parametrize("fails_at", [0, 2])
async def test_a_transport_that_fails_in_mid_pull_is_replaced_by_grpc(
    transport: TransportChoice, fails_at: int, caplog: pytest.LogCaptureFixture
):
    storage, transports = lent_storage(transport, BIG_LAYOUT)
    behind_gate, _ = gated(transports, fails_at)
    table = blocks(*range(32))  # four frames
    async with (
        source(transport=transport, layout=BIG_LAYOUT) as origin,
        destination(storage=storage, transports=behind_gate) as target,
    ):
        origin.server.open(ID, table).hand_over(handover("t", 32 * BLOCK))
        outcome = await target.pull(origin.offer("t"), 0, table)
        assert (outcome.num_tokens, outcome.error) == (32 * BLOCK, None)
        assert target.handovers == [handover("t", 32 * BLOCK)]  # once, although both streams bring it
        assert storage.read(table) == origin.storage.read(table)
        counters, frame_bytes = target.client.counters, 8 * BIG_LAYOUT.block_bytes
        assert getattr(counters, f"bytes_by_{transport}") == fails_at * frame_bytes
        assert counters.bytes_by_grpc == (4 - fails_at) * frame_bytes
        assert counters.fallbacks == 1
        assert (await target.pull(origin.offer("t"), 0, table)).error is None
        assert counters.fallbacks == 1  # the pair stays with gRPC
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"blocks of p0 come by grpc and no longer by {transport}: the cable is out"
    ]


def announcement(storage: KvStorage, seq: int) -> bytes:
    """One block, of the same number, as it is now."""
    block_ids = tuple(blocks(seq))
    checksum = payload_checksum(storage.parts(block_ids))
    return encode_pull_item(KvFrame(ID, seq, seq * BLOCK, (seq + 1) * BLOCK, block_ids, checksum, None))


@pytest.mark.parametrize("transport", BY_ID)
async def test_a_byte_that_changed_between_announcement_and_read_is_noticed(transport: TransportChoice):
    storage, transports = lent_storage(transport)
    asked: list[str] = []

    async def script(pull: Pull) -> AsyncIterator[bytes]:
        asked.append(pull.transport)
        yield announcement(storage, 0)
        yield announcement(storage, 1)
        third = announcement(storage, 2)
        storage.blocks[2, 7] ^= 1
        yield third

    async with (
        scripted_source(script, transports=transports) as address,
        destination(transport=transport) as target,
    ):
        outcome = await target.pull(make_offer("t", address), 0, ALL)
        assert isinstance(outcome.error, CorruptFrame)
        assert outcome.num_tokens == 2 * BLOCK
        assert target.storage.read(ALL[:2]) == storage.read(ALL[:2])
        assert target.client.counters.corrupt_frames == 1
        await target.pull(make_offer("t", address), 0, ALL)
        assert asked == [transport, "grpc"]  # whatever is wrong there, it is not trusted again


@pytest.mark.parametrize("transport", BY_ID)
async def test_blocks_that_were_reused_before_they_were_read_are_not_believed(transport: TransportChoice):
    storage, transports = lent_storage(transport)
    behind_gate, gate = gated(transports)
    async with (
        source(transport=transport) as origin,
        destination(storage=storage, transports=behind_gate) as target,
    ):
        origin.server.open(ID, ALL).advance(6 * BLOCK)
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await gate.has_frame.wait()
        origin.clock.now += origin.leases.lease_s
        origin.server.reap()  # the lease has ended, so the blocks go to another prompt
        origin.storage.write(ALL, memoryview(new_storage().read(ALL)))
        gate.may_read.set()
        outcome = await pulling
        assert isinstance(outcome.error, CorruptFrame | UnknownTransfer)
        assert outcome.num_tokens == 0


@pytest.mark.parametrize("transport", BY_ID)
async def test_blocks_stay_leased_while_they_are_read(transport: TransportChoice):
    storage, transports = lent_storage(transport)
    behind_gate, gate = gated(transports)
    async with (
        source(transport=transport) as origin,
        destination(storage=storage, transports=behind_gate) as target,
    ):
        origin.server.open(ID, ALL).hand_over(handover("t", 6 * BLOCK))
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await gate.has_frame.wait()
        await until(lambda: origin.server.counters.frames_sent == 1)
        assert ID in origin.leases  # all is announced, and nothing read yet
        gate.may_read.set()
        assert (await pulling).error is None
        assert ID in origin.leases
        await target.say_done(origin.offer("t"))
        assert ID not in origin.leases


@pytest.mark.parametrize("transport", BY_ID)
@pytest.mark.parametrize("name", ["a block that is not there", "a negative block"])
async def test_a_block_that_does_not_exist_is_not_read(transport: TransportChoice, name: str):
    storage, transports = lent_storage(transport)

    async def script(_: Pull) -> AsyncIterator[bytes]:
        block_id = -1 if name == "a negative block" else storage.num_blocks
        yield encode_pull_item(KvFrame(ID, 0, 0, BLOCK, tuple(blocks(block_id)), 0, None))

    async with (
        scripted_source(script, transports=transports) as address,
        destination(transport=transport) as target,
    ):
        before = target.storage.read(ALL)
        outcome = await target.pull(make_offer("t", address), 0, ALL)
        assert isinstance(outcome.error, CorruptFrame)
        assert "does not exist" in outcome.error.message
        assert target.storage.read(ALL) == before


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_source_that_is_killed_leaves_the_prefix_that_it_announced(transport: TransportChoice):
    async with (
        source_process(transport, ID, num_blocks=6, num_ready=3) as origin,
        destination(transport=transport) as target,
    ):
        before = target.storage.read(ALL)
        pulling = asyncio.create_task(target.pull(make_offer("t", origin.address), 0, ALL))
        await until(lambda: target.client.counters.frames_received == 1)
        origin.process.kill()
        outcome = await pulling
        assert isinstance(outcome.error, Unavailable)
        assert outcome.num_tokens == 3 * BLOCK
        assert target.storage.read(ALL[:3]) == origin.content
        assert target.storage.read(ALL[3:]) == before[len(origin.content) :]


@pytest.mark.parametrize("transport", BY_ID)
async def test_a_source_that_is_killed_before_its_blocks_are_read_gives_right_bytes_or_an_error(
    transport: TransportChoice,
):
    storage, transports = lent_storage(transport)
    behind_gate, gate = gated(transports)
    async with (
        source_process(transport, ID, num_blocks=6, num_ready=3) as origin,
        destination(storage=storage, transports=behind_gate) as target,
    ):
        pulling = asyncio.create_task(target.pull(make_offer("t", origin.address), 0, ALL))
        await gate.has_frame.wait()
        origin.process.kill()
        await origin.process.wait()
        gate.may_read.set()
        outcome = await pulling
        assert isinstance(outcome.error, Unavailable)
        assert outcome.num_tokens in (0, 3 * BLOCK)
        num_blocks = outcome.num_tokens // BLOCK
        assert target.storage.read(ALL[:num_blocks]) == origin.content[: num_blocks * storage.layout.block_bytes]

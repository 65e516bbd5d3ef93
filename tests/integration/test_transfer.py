"""Hand-overs as they should go: every byte arrives, once, and no more than is needed."""

import asyncio

import pytest

from common.errors import InvalidRequest
from common.ids import TransferId
from common.messages import Handover, Pull
from common.services import PULL
from kvstore.outgoing import ReleaseReason
from kvstore.peers import PeerSet
from kvstore.transports.choices import TransportChoice
from tests.support.transfer import (
    BIG_LAYOUT,
    BLOCK,
    TOKEN,
    TRANSPORTS,
    Destination,
    Source,
    blocks,
    destination,
    handover,
    source,
    until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> TransportChoice:
    return request.param


ID = TransferId("t")


def assert_equal_blocks(origin: Source, origin_ids: list[int], target: Destination, target_ids: list[int]) -> None:
    assert target.storage.read(blocks(*target_ids)) == origin.storage.read(blocks(*origin_ids))


@pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1])
async def test_a_prompt_of_any_length_arrives_whole(num_tokens: int, transport: TransportChoice):
    num_blocks = -(-num_tokens // BLOCK)
    from_ids, to_ids = list(range(40, 40 - num_blocks, -1)), list(range(3, 3 + 2 * num_blocks, 2))
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, blocks(*from_ids))
        outgoing.advance(num_tokens)
        outgoing.hand_over(handover("t", num_tokens))
        untouched = target.storage.read(blocks(0, 1, 2, 60))
        outcome = await target.pull(origin.offer("t"), 0, blocks(*to_ids))
        assert outcome.error is None
        assert outcome.num_tokens == num_tokens
        assert outcome.handover == handover("t", num_tokens)
        assert target.handovers == [handover("t", num_tokens)]
        assert_equal_blocks(origin, from_ids, target, to_ids)
        assert target.storage.read(blocks(0, 1, 2, 60)) == untouched
        await target.say_done(origin.offer("t"))
        assert origin.released == [(ID, ReleaseReason.DONE)]
        assert origin.server.counters.bytes_sent == num_blocks * origin.storage.layout.block_bytes


async def test_blocks_arrive_as_chunks_complete(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, blocks(10, 11, 12, 13))
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, blocks(0, 1, 2, 3)))
        for num_computed, num_here in [(5, 1), (8, 2), (14, 3)]:
            outgoing.advance(num_computed)
            await until(lambda wanted=num_here: target.client.counters.frames_received == wanted)
            assert_equal_blocks(origin, list(range(10, 10 + num_here)), target, list(range(num_here)))
            assert not pulling.done()
            assert target.handovers == []
        outgoing.hand_over(handover("t", 14))
        outcome = await pulling
        assert (outcome.num_tokens, outcome.error) == (14, None)
        assert_equal_blocks(origin, [10, 11, 12, 13], target, [0, 1, 2, 3])


async def test_the_pull_may_begin_before_anything_is_computed(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, blocks(10))
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, blocks(0)))
        await until(lambda: origin.server.counters.pulls == 1)
        outgoing.hand_over(handover("t", 3))
        assert (await pulling).error is None


@pytest.mark.parametrize(("have_tokens", "num_frames"), [(0, 1), (4, 1), (8, 1), (10, 0)])
async def test_only_what_the_puller_lacks_is_moved(have_tokens: int, num_frames: int, transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, blocks(10, 11, 12))
        outgoing.hand_over(handover("t", 10))
        before = target.storage.read(blocks(0, 1, 2))
        outcome = await target.pull(origin.offer("t"), have_tokens, blocks(0, 1, 2))
        assert (outcome.num_tokens, outcome.error) == (10, None)
        assert outcome.handover is not None
        assert origin.server.counters.frames_sent == num_frames
        num_kept = -(-have_tokens // BLOCK)
        assert target.storage.read(blocks(0, 1, 2)[:num_kept]) == before[: num_kept * origin.storage.layout.block_bytes]
        assert_equal_blocks(origin, list(range(10 + num_kept, 13)), target, list(range(num_kept, 3)))


async def test_a_transfer_of_nothing_still_ends_with_handover_and_done(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, blocks(10))
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 3, ()))
        await until(lambda: origin.server.counters.pulls == 1)
        outgoing.hand_over(handover("t", 3))
        outcome = await pulling
        assert (outcome.num_tokens, outcome.error) == (3, None)
        assert outcome.handover == handover("t", 3)
        assert origin.server.counters.frames_sent == 0
        await target.say_done(origin.offer("t"))
        assert origin.released == [(ID, ReleaseReason.DONE)]
        assert len(origin.leases) == 0


async def test_no_blocks_follow_a_token_that_ends_the_answer(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, blocks(10, 11))
        outgoing.hand_over(handover("t", 8, has_kv=False))
        outcome = await target.pull(origin.offer("t"), 0, blocks(0, 1))
        assert outcome.error is None
        assert outcome.num_tokens == 0
        assert outcome.handover == handover("t", 8, has_kv=False)
        assert origin.server.counters.frames_sent == 0


async def test_the_token_comes_ahead_of_the_blocks_that_are_not_sent_yet(transport: TransportChoice):
    async with (
        source(transport=transport, layout=BIG_LAYOUT) as origin,
        destination(transport=transport, layout=BIG_LAYOUT) as target,
    ):
        outgoing = origin.server.open(ID, blocks(*range(40)))
        frames_before_token: list[int] = []

        def note(_: Handover) -> None:
            frames_before_token.append(target.client.counters.frames_received)

        outgoing.hand_over(handover("t", 40 * BLOCK))
        outcome = await target.pull(origin.offer("t"), 0, blocks(*range(40)), note)
        assert outcome.error is None
        assert frames_before_token == [0]
        assert target.client.counters.frames_received == 5
        assert_equal_blocks(origin, list(range(40)), target, list(range(40)))


async def test_frames_are_not_sent_far_ahead_of_a_puller_that_does_not_read():
    """Back-pressure: what is under way is bounded by the connection, not by the transfer, and holds up nobody else."""
    async with source(layout=BIG_LAYOUT) as origin, destination(layout=BIG_LAYOUT) as target:
        num_blocks = 640  # 80 frames; the source's blocks serve several times over
        long = origin.server.open(ID, [block_id for _ in range(10) for block_id in blocks(*range(64))])
        long.hand_over(handover("t", num_blocks * BLOCK))
        peers = PeerSet(TOKEN)
        stream = peers.get(origin.address).stream(PULL, Pull(ID, origin.epoch, 0))
        await anext(stream)  # and no more
        for number in range(4):
            other = origin.server.open(TransferId(str(number)), blocks(*range(64)))
            other.hand_over(handover(str(number), 64 * BLOCK))
            assert (await target.pull(origin.offer(str(number)), 0, blocks(*range(64)))).error is None
        assert origin.server.counters.frames_sent - 4 * 8 <= 80 // 2
        await stream.aclose()
        await peers.close()


async def test_a_pull_can_be_repeated_from_where_the_first_got_to(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, blocks(10, 11, 12))
        outgoing.advance(8)
        first = asyncio.create_task(target.pull(origin.offer("t"), 0, blocks(0, 1, 2)))
        await until(lambda: target.client.counters.frames_received == 1)
        first.cancel()
        await asyncio.wait([first])
        outgoing.hand_over(handover("t", 12))
        outcome = await target.pull(origin.offer("t"), 8, blocks(0, 1, 2))
        assert (outcome.num_tokens, outcome.error) == (12, None)
        assert_equal_blocks(origin, [10, 11, 12], target, [0, 1, 2])


async def test_two_pulls_of_one_transfer_each_get_everything(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, blocks(10, 11))
        pulls = [asyncio.create_task(target.pull(origin.offer("t"), 0, blocks(*table))) for table in ([0, 1], [2, 3])]
        await until(lambda: origin.server.counters.pulls == 2)
        outgoing.advance(4)
        outgoing.hand_over(handover("t", 7))
        outcomes = await asyncio.gather(*pulls)
        assert [outcome.error for outcome in outcomes] == [None, None]
        for table in ([0, 1], [2, 3]):
            assert_equal_blocks(origin, [10, 11], target, table)


async def test_many_transfers_at_once_do_not_mix(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        async with asyncio.TaskGroup() as group:
            tasks = []
            for number in range(16):
                outgoing = origin.server.open(TransferId(str(number)), blocks(63 - 2 * number, 62 - 2 * number))
                offer = origin.offer(str(number), outgoing.generation)
                tasks.append(group.create_task(target.pull(offer, 0, blocks(2 * number, 2 * number + 1))))
                outgoing.advance(5)
                outgoing.hand_over(handover(str(number), 6))
        for number, task in enumerate(tasks):
            assert task.result().error is None
            assert_equal_blocks(origin, [63 - 2 * number, 62 - 2 * number], target, [2 * number, 2 * number + 1])


@pytest.mark.parametrize("have_tokens", [-4, 5, 12])
async def test_an_impossible_start_is_refused_and_the_transfer_lives_on(have_tokens: int, transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        outgoing = origin.server.open(ID, blocks(10, 11))
        outgoing.hand_over(handover("t", 8))
        outcome = await target.pull(origin.offer("t"), have_tokens, blocks(0, 1))
        assert isinstance(outcome.error, InvalidRequest)
        assert outcome.num_tokens == have_tokens
        assert (await target.pull(origin.offer("t"), 0, blocks(0, 1))).error is None

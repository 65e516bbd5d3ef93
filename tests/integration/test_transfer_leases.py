"""How transfers end: done, cancelled, expired, closed; early, late, twice, and many at once."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from common.errors import UnknownTransfer
from common.ids import Epoch, TransferId
from common.messages import Ack, Cancel, Done, Lease, Offer, Renew, RenewReply
from common.rpc import Handlers, RpcServer
from common.services import CANCEL, DONE, RENEW
from kvstore.block_pool import BlockPool
from kvstore.lease import LeaseTable
from kvstore.lease_keeper import TRIES
from kvstore.outgoing import ReleaseReason
from kvstore.transfer_server import TOMBSTONE_S, TransferServer
from kvstore.transports.choices import TransportChoice
from tests.support.transfer import (
    BLOCK,
    PATIENCE_S,
    SOURCE_EPOCH,
    TOKEN,
    TRANSPORTS,
    Destination,
    Source,
    blocks,
    destination,
    handover,
    identity,
    make_offer,
    new_storage,
    source,
    until,
)

pytestmark = pytest.mark.anyio


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> TransportChoice:
    return request.param


ID = TransferId("t")
ALL = blocks(10, 11, 12)


async def test_done_releases_once_and_is_ignored_when_late_or_repeated():
    async with source() as origin, destination() as target:
        first = origin.server.open(ID, ALL)
        await target.say_done(origin.offer("t", first.generation))
        await target.say_done(origin.offer("t", first.generation))
        assert origin.released == [(ID, ReleaseReason.DONE)]
        second = origin.server.open(ID, ALL)
        await target.say_done(origin.offer("t", first.generation))  # late, about the first
        assert origin.released == [(ID, ReleaseReason.DONE)]
        assert origin.server.counters.unknown == 2
        await target.say_done(origin.offer("t", second.generation))
        assert len(origin.released) == 2


async def test_cancel_of_the_unknown_is_ignored_and_counted():
    async with source() as origin, destination() as target:
        await target.say_cancel(origin.offer("nobody"))
        assert origin.released == []
        assert origin.server.counters.unknown == 1


async def test_a_cancel_that_comes_first_ends_the_transfer_as_it_opens(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        await target.say_cancel(origin.offer("t"))
        outgoing = origin.server.open(ID, ALL)
        assert isinstance(outgoing.error, UnknownTransfer)
        assert origin.released == []  # not inside open: its caller has not noted the transfer yet
        outgoing.advance(BLOCK)
        outgoing.hand_over(handover("t", 3 * BLOCK))
        await asyncio.sleep(0)
        assert origin.released == [(ID, ReleaseReason.CANCELLED)]
        assert len(origin.leases) == 0
        origin.server.close(ID)
        assert len(origin.released) == 1
        assert isinstance((await target.pull(origin.offer("t"), 0, ALL)).error, UnknownTransfer)


async def test_an_early_cancel_is_forgotten_in_time():
    async with source() as origin, destination() as target:
        await target.say_cancel(origin.offer("t"))
        origin.clock.now += TOMBSTONE_S
        assert origin.server.open(ID, ALL).error is None


async def test_a_transfer_that_is_open_cannot_be_opened_again():
    async with source() as origin:
        origin.server.open(ID, ALL)
        with pytest.raises(ValueError, match="already has a lease"):
            origin.server.open(ID, ALL)
        origin.server.close(ID)
        assert origin.server.open(ID, ALL).error is None


async def test_the_engine_may_close_a_transfer_whenever_it_likes(transport: TransportChoice):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        origin.server.open(ID, ALL).advance(BLOCK)
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await until(lambda: target.client.counters.frames_received == 1)
        origin.server.close(ID)
        origin.server.close(ID)
        outcome = await pulling
        assert isinstance(outcome.error, UnknownTransfer)
        assert outcome.num_tokens == BLOCK
        assert origin.released == [(ID, ReleaseReason.CLOSED)]


async def test_an_expired_transfer_is_released_and_its_stream_ends(transport: TransportChoice):
    async with source(transport=transport, lease_s=30) as origin, destination(transport=transport) as target:
        origin.server.open(ID, ALL)
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await until(lambda: origin.server.counters.pulls == 1)
        origin.clock.now += 29.9
        origin.server.reap()
        assert origin.released == []
        origin.clock.now += 0.1
        origin.server.reap()
        assert origin.released == [(ID, ReleaseReason.EXPIRED)]
        outcome = await pulling
        assert isinstance(outcome.error, UnknownTransfer)
        assert "lease" in outcome.error.message
        assert origin.server.counters.expired == 1


async def test_the_reaper_needs_no_traffic():
    released = asyncio.Event()
    server = TransferServer(
        new_storage(),
        BLOCK,
        identity("p0", SOURCE_EPOCH),
        LeaseTable(0.05),
        lambda transfer_id, reason: released.set(),
        asyncio.get_running_loop().time,
    )
    reaping = asyncio.create_task(server.run())
    server.open(ID, ALL)
    async with asyncio.timeout(PATIENCE_S):
        await released.wait()
    assert server.counters.expired == 1
    reaping.cancel()
    await asyncio.wait([reaping])


async def test_a_pull_counts_as_a_renewal():
    async with source(lease_s=30) as origin, destination() as target:
        origin.server.open(ID, ALL)
        origin.clock.now += 29
        pulling = asyncio.create_task(target.pull(origin.offer("t"), 0, ALL))
        await until(lambda: origin.server.counters.pulls == 1)
        origin.clock.now += 29
        origin.server.reap()
        assert origin.released == []
        pulling.cancel()
        await asyncio.wait([pulling])


async def test_128_transfers_wait_for_one_slow_puller_and_none_expires():
    async with source(lease_s=2) as origin, destination(renew_s=0.01) as target:
        for number in range(128):
            outgoing = origin.server.open(TransferId(str(number)), blocks(number % 64))
            target.client.expect(origin.offer(str(number), outgoing.generation))
        renewals = target.client.leases.counters
        for _ in range(10):
            seen = renewals.renewals
            await until(lambda seen=seen: renewals.renewals >= seen + 2)  # one was sent after this moment
            origin.clock.now += 1.9
            origin.server.reap()
            assert len(origin.leases) == 128
        assert origin.server.counters.unknown == 0
        for number in range(128):
            target.client.done(origin.offer(str(number), number + 1))
        await target.told()
        assert Counter(reason for _, reason in origin.released) == {ReleaseReason.DONE: 128}
        assert target.client.leases.num_awaited == 0


async def test_without_its_renewer_a_transfer_expires():
    async with source(lease_s=2) as origin:
        async with destination(renew_s=0.01) as target:
            origin.server.open(ID, ALL)
            target.client.expect(origin.offer("t"))
            await until(lambda: target.client.leases.counters.renewals > 0)
        origin.clock.now += 2
        origin.server.reap()
        assert origin.released == [(ID, ReleaseReason.EXPIRED)]


async def test_a_lease_that_is_gone_is_no_longer_renewed():
    async with source() as origin, destination(renew_s=0.01) as target:
        target.client.expect(origin.offer("gone"))
        target.client.expect(make_offer("stale", origin.address, Epoch(99)))
        await until(lambda: target.client.leases.counters.leases_lost == 2)
        assert target.client.leases.num_awaited == 0
        assert origin.server.counters.unknown == 1


class Notebook:
    """A source that writes down what it is told, and answers when it may."""

    def __init__(self, failures: int = 0) -> None:
        self.done: list[Done] = []
        self.cancelled: list[Cancel] = []
        self.renewed: list[Renew] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._failures = failures

    async def hear_done(self, message: Done) -> Ack:
        self.done.append(message)
        return await self._answer()

    async def hear_cancel(self, message: Cancel) -> Ack:
        self.cancelled.append(message)
        return await self._answer()

    async def hear_renew(self, message: Renew) -> RenewReply:
        self.renewed.append(message)
        return RenewReply(())

    async def _answer(self) -> Ack:
        await self.may_answer.wait()
        if self._failures:
            self._failures -= 1
            raise UnknownTransfer("a passing fault")
        return Ack()

    def server(self) -> RpcServer:
        handlers = {DONE: self.hear_done, CANCEL: self.hear_cancel, RENEW: self.hear_renew}
        return RpcServer("127.0.0.1", 0, Handlers(handlers, {}, {}), TOKEN)


async def with_notebook(notebook: Notebook, test: Callable[[Destination, str], Awaitable[None]], renew_s: float = 5.0):
    server = notebook.server()
    await server.start()
    async with destination(renew_s=renew_s) as target:
        await test(target, server.address)
    await server.stop(0)


async def test_what_comes_up_while_a_done_is_on_its_way_travels_together():
    notebook = Notebook()

    async def test(target: Destination, address: str) -> None:
        notebook.may_answer.clear()
        target.client.done(make_offer("first", address))
        await until(lambda: len(notebook.done) == 1)
        for number in range(50):
            target.client.done(make_offer(str(number), address))
            target.client.cancel(make_offer(f"c{number}", address), "left")
        notebook.may_answer.set()
        await target.told()

    await with_notebook(notebook, test)
    assert [len(message.leases) for message in notebook.done] == [1, 50]
    assert notebook.done[1].leases[3] == Lease(TransferId("3"), 1)
    assert [len(message.transfer_ids) for message in notebook.cancelled] == [50]
    assert notebook.cancelled[0].reason == "left"


async def test_one_renew_carries_all_ids_of_a_source():
    notebook = Notebook()

    async def test(target: Destination, address: str) -> None:
        for number in range(64):
            target.client.expect(make_offer(str(number), address))
        await until(lambda: len(notebook.renewed) == 2)
        target.client.cancel(make_offer("0", address), "")
        target.client.done(make_offer("1", address))
        await until(lambda: len(notebook.renewed) == 4)

    await with_notebook(notebook, test, renew_s=0.01)
    assert len(notebook.renewed[0].transfer_ids) == 64
    assert set(notebook.renewed[3].transfer_ids) == {str(number) for number in range(2, 64)}


async def test_a_farewell_is_tried_again():
    notebook = Notebook(failures=1)

    async def test(target: Destination, address: str) -> None:
        target.client.cancel(make_offer("t", address), "left")
        await target.told()
        assert target.client.leases.counters.farewells_lost == 0

    await with_notebook(notebook, test)
    assert len(notebook.cancelled) == 2
    assert notebook.cancelled[0] == notebook.cancelled[1]


async def test_a_farewell_that_nobody_hears_is_given_up_and_counted():
    notebook = Notebook(failures=TRIES)

    async def test(target: Destination, address: str) -> None:
        target.client.done(make_offer("t", address))
        await target.told()
        assert target.client.leases.counters.farewells_lost == 1

    await with_notebook(notebook, test)
    assert len(notebook.done) == TRIES


async def test_a_source_that_does_not_answer_holds_up_no_other():
    frozen = Notebook()
    frozen.may_answer.clear()

    async def test(target: Destination, address: str) -> None:
        target.client.done(make_offer("stuck", address))
        await until(lambda: len(frozen.done) == 1)
        async with source() as origin:
            origin.server.open(ID, ALL)
            target.client.done(origin.offer("t"))
            await until(lambda: origin.released == [(ID, ReleaseReason.DONE)])
        frozen.may_answer.set()
        await target.told()

    await with_notebook(frozen, test)


# ---- cancelled at each moment: released exactly once, and ten others are not disturbed ----


async def before_the_pull(origin: Source, target: Destination, offer: Offer) -> None:
    origin.server.open(offer.transfer_id, blocks(0, 1))


async def while_it_waits(origin: Source, target: Destination, offer: Offer) -> None:
    origin.server.open(offer.transfer_id, blocks(0, 1))
    await begin(origin, target, offer)


async def between_chunks(origin: Source, target: Destination, offer: Offer) -> None:
    outgoing = origin.server.open(offer.transfer_id, blocks(0, 1))
    outgoing.advance(BLOCK)
    received = target.client.counters.frames_received
    await begin(origin, target, offer)
    await until(lambda: target.client.counters.frames_received == received + 1)


async def after_the_last_byte(origin: Source, target: Destination, offer: Offer) -> None:
    origin.server.open(offer.transfer_id, blocks(0, 1)).hand_over(handover(offer.transfer_id, 2 * BLOCK))
    assert (await target.pull(offer, 0, blocks(0, 1))).error is None


async def after_done(origin: Source, target: Destination, offer: Offer) -> None:
    await after_the_last_byte(origin, target, offer)
    await target.say_done(offer)


async def begin(origin: Source, target: Destination, offer: Offer) -> None:
    pulls = origin.server.counters.pulls
    task = asyncio.create_task(target.pull(offer, 0, blocks(0, 1)))
    _begun.add(task)
    task.add_done_callback(_begun.discard)
    await until(lambda: origin.server.counters.pulls == pulls + 1)


_begun: set[asyncio.Task[object]] = set()


@pytest.mark.parametrize("moment", [before_the_pull, while_it_waits, between_chunks, after_the_last_byte, after_done])
async def test_cancel_at_each_moment(
    moment: Callable[[Source, Destination, Offer], Awaitable[None]], transport: TransportChoice
):
    async with source(transport=transport) as origin, destination(transport=transport) as target:
        others = [origin.server.open(TransferId(str(n)), blocks(20 + n, 40 + n)) for n in range(10)]
        pulls = [
            asyncio.create_task(target.pull(origin.offer(str(n), other.generation), 0, blocks(10 + n, 30 + n)))
            for n, other in enumerate(others)
        ]
        await until(lambda: origin.server.counters.pulls == 10)
        offer = origin.offer("victim", generation=11)
        await moment(origin, target, offer)
        await target.say_cancel(offer)
        await target.say_cancel(offer)
        assert [transfer_id for transfer_id, _ in origin.released] == ["victim"]
        assert TransferId("victim") not in origin.leases
        await until(lambda: not _begun)
        for n, other in enumerate(others):
            other.hand_over(handover(str(n), 2 * BLOCK))
        for n, outcome in enumerate(await asyncio.gather(*pulls)):
            assert outcome.error is None
            assert target.storage.read(blocks(10 + n, 30 + n)) == origin.storage.read(blocks(20 + n, 40 + n))


async def test_blocks_are_back_to_baseline_after_every_kind_of_end():
    pool = BlockPool(64, BLOCK)
    held: dict[TransferId, list[int]] = {}
    async with source(lease_s=30) as origin, destination() as target:
        names = [TransferId(name) for name in ("done", "cancelled", "expired", "closed")]
        for name in names:
            held[name] = pool.allocate(3)
            origin.server.open(name, held[name])
        pool.check_integrity(origin.leases.holders())
        target.client.done(origin.offer("done", 1))
        target.client.cancel(origin.offer("cancelled", 2), "left")
        await target.told()
        origin.server.close(TransferId("closed"))
        origin.clock.now += 30
        origin.server.reap()
        assert {name: reason.value for name, reason in origin.released} == {name: name for name in names}
        for name, _ in origin.released:
            pool.release(held.pop(name))
        pool.check_integrity(origin.leases.holders())
        assert pool.counts().free == 64

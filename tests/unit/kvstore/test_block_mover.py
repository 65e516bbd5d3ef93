"""Copies in a thread: in order, and over before a cancelled caller goes on."""

import asyncio
import threading

import pytest

from kvstore.block_mover import BlockMover

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("in_thread", [False, True])
async def test_results_and_errors_come_back(in_thread: bool):
    mover = BlockMover(in_thread=in_thread)
    assert await mover.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await mover.run(lambda: 1 // 0)


async def test_a_thread_leaves_the_event_loop_free():
    mover = BlockMover(in_thread=True)
    may_end = threading.Event()
    running = asyncio.ensure_future(mover.run(lambda: may_end.wait(10)))
    await asyncio.sleep(0)
    may_end.set()  # from the event loop, while the copy waits for it
    assert await running


async def test_a_cancelled_caller_goes_on_only_when_its_copy_has_ended():
    mover = BlockMover(in_thread=True)
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert may_end.wait(10)
        ended.set()

    running = asyncio.ensure_future(mover.run(copy))
    await asyncio.to_thread(begun.wait, 10)
    for _ in range(3):  # impatience does not help
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


async def test_a_cancelled_caller_whose_copy_waits_in_line_never_sees_it_run():
    mover = BlockMover(in_thread=True)
    begun, may_end = threading.Event(), threading.Event()
    ran: list[int] = []
    first = asyncio.ensure_future(mover.run(lambda: (begun.set(), may_end.wait(10))))
    await asyncio.to_thread(begun.wait, 10)
    second = asyncio.ensure_future(mover.run(lambda: ran.append(2)))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    may_end.set()
    await first
    await mover.run(lambda: ran.append(3))
    assert ran == [3]


async def test_a_copy_that_fails_after_its_caller_was_cancelled_is_not_an_orphaned_error():
    mover = BlockMover(in_thread=True)
    begun, may_end = threading.Event(), threading.Event()

    def copy() -> None:
        begun.set()
        assert may_end.wait(10)
        raise ValueError("late")

    running = asyncio.ensure_future(mover.run(copy))
    await asyncio.to_thread(begun.wait, 10)
    running.cancel()
    await asyncio.sleep(0)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await running

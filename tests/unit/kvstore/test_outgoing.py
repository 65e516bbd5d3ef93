"""What a transfer at its source lets a puller have, and when."""

import asyncio

import pytest

from common.errors import BatonError, InternalError, InvalidRequest, UnknownTransfer
from common.ids import BlockId, TransferId
from common.messages import Handover, SampledToken
from kvstore.outgoing import FrameSpan, Outgoing, fresh

BLOCK = 4
ID = TransferId("t")


def new_outgoing(num_blocks: int = 3) -> Outgoing:
    blocks = [BlockId(10 + number) for number in range(num_blocks)]
    return Outgoing(ID, 1, blocks, BLOCK, lambda outgoing, error: outgoing.end(error))


def handover(num_tokens: int, *, has_kv: bool = True) -> Handover:
    return Handover(ID, num_tokens, (SampledToken(0, 7),), cached_tokens=0, has_kv=has_kv)


@pytest.mark.parametrize(
    ("num_computed", "num_sent", "span"),
    [
        (0, 0, None),
        (3, 0, None),
        (4, 0, FrameSpan(0, 4, (10,))),
        (7, 0, FrameSpan(0, 4, (10,))),
        (9, 0, FrameSpan(0, 8, (10, 11))),
        (9, 4, FrameSpan(4, 8, (11,))),
        (9, 8, None),
        (12, 0, FrameSpan(0, 8, (10, 11))),  # two blocks a frame
        (12, 4, FrameSpan(4, 12, (11, 12))),
        (8, 12, None),
    ],
)
def test_full_computed_blocks_can_go_before_the_prompt_is_done(
    num_computed: int, num_sent: int, span: FrameSpan | None
):
    outgoing = new_outgoing()
    outgoing.advance(num_computed)
    assert outgoing.next_span(num_sent, 2) == span
    assert not outgoing.is_served(num_sent)


def test_the_partly_filled_last_block_goes_once_the_prompt_is_done():
    outgoing = new_outgoing()
    outgoing.advance(10)
    assert outgoing.next_span(8, 2) is None
    outgoing.hand_over(handover(10))
    assert outgoing.next_span(8, 2) == FrameSpan(8, 10, (12,))
    assert outgoing.next_span(0, 9) == FrameSpan(0, 10, (10, 11, 12))
    assert not outgoing.is_served(8)
    assert outgoing.is_served(10)
    assert outgoing.next_span(10, 2) is None


def test_a_puller_that_has_every_token_waits_for_the_handover_only():
    outgoing = new_outgoing()
    outgoing.advance(12)
    assert outgoing.next_span(10, 2) is None
    assert not outgoing.is_served(10)
    outgoing.hand_over(handover(10))
    assert outgoing.is_served(10)


def test_nothing_more_is_needed_when_the_token_ends_the_answer():
    outgoing = new_outgoing()
    outgoing.hand_over(handover(10, has_kv=False))
    assert outgoing.is_served(0)


def test_progress_never_goes_back():
    outgoing = new_outgoing()
    outgoing.advance(8)
    outgoing.advance(4)
    assert outgoing.next_span(0, 9) == FrameSpan(0, 8, (10, 11))


def test_what_does_not_fit_is_a_fault_of_the_engine():
    outgoing = new_outgoing()
    with pytest.raises(ValueError, match="13 tokens do not fit"):
        outgoing.advance(13)
    with pytest.raises(ValueError, match="13 tokens do not fit"):
        outgoing.hand_over(handover(13))
    outgoing.hand_over(handover(12))
    with pytest.raises(ValueError, match="cannot take"):
        outgoing.hand_over(handover(12))


@pytest.mark.parametrize("have_tokens", [-1, 13, 2**40])
def test_a_start_outside_the_transfer_is_refused(have_tokens: int):
    with pytest.raises(InvalidRequest, match="does not cover") as caught:
        new_outgoing().check_start(have_tokens)
    assert caught.value.param == "have_tokens"


def test_a_start_inside_a_block_must_be_the_end_of_the_prompt():
    outgoing = new_outgoing()
    outgoing.check_start(10)  # nobody knows yet
    outgoing.hand_over(handover(10))
    outgoing.check_start(10)
    outgoing.check_start(8)
    with pytest.raises(InvalidRequest, match="multiple of 4 or all"):
        outgoing.check_start(9)
    with pytest.raises(InvalidRequest, match="does not cover"):
        outgoing.check_start(12)


def test_after_the_end_everything_is_ignored_and_the_error_is_told():
    outgoing = new_outgoing()
    outgoing.fail(InternalError("first"))
    outgoing.fail(InternalError("second"))
    outgoing.advance(1000)
    outgoing.hand_over(handover(1000))
    with pytest.raises(InternalError, match="first"):
        outgoing.raise_if_ended()
    assert outgoing.handover is None


def test_a_fresh_error_is_equal_and_new():
    error = UnknownTransfer("gone", param="p", retry_after_s=2.0)
    copy = fresh(error)
    assert type(copy) is UnknownTransfer
    assert copy is not error
    assert (copy.message, copy.param, copy.retry_after_s) == ("gone", "p", 2.0)
    assert isinstance(copy, BatonError)


@pytest.mark.anyio
async def test_every_change_wakes_everybody_who_waits():
    outgoing = new_outgoing()
    changes = [
        lambda: outgoing.advance(1),
        lambda: outgoing.hand_over(handover(4)),
        lambda: outgoing.end(UnknownTransfer("gone")),
    ]
    for change in changes:
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            waiting = [group.create_task(outgoing.wait_changed()) for _ in range(2)]
            group.create_task(_soon(change))
        assert all(task.done() for task in waiting)


async def _soon(change: object) -> None:
    assert callable(change)
    change()

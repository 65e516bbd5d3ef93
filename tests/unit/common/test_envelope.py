"""Checksums and numbers on control messages."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.envelope import StreamOpener, StreamSealer, seal, unseal, with_beats
from common.errors import CorruptFrame, InvalidRequest
from common.ids import Epoch
from common.messages import Ack, Drain
from common.wire import decode_sealed, encode_sealed

MESSAGES = [b"one", b"", b"two", b"three"]


@given(st.binary(max_size=200), st.integers(min_value=0), st.integers(0, 7))
def test_one_changed_bit_anywhere_is_noticed(message: bytes, place: int, bit: int) -> None:
    data = bytearray(seal(message))
    assert unseal(bytes(data)) == message
    data[place % len(data)] ^= 1 << bit
    with pytest.raises(CorruptFrame):
        unseal(bytes(data))


@given(st.binary(max_size=20), st.integers(min_value=0))
def test_a_cut_message_is_noticed(message: bytes, length: int) -> None:
    data = seal(message)
    with pytest.raises(CorruptFrame):
        unseal(data[: length % len(data)])


def sealed() -> list[bytes]:
    sealer = StreamSealer()
    return [sealer.seal(message) for message in MESSAGES]


def opened(elements: list[bytes]) -> list[bytes]:
    opener = StreamOpener()
    return [opener.open(element) for element in elements]


def test_a_stream_in_order_is_read_as_it_was_written() -> None:
    assert opened(sealed()) == MESSAGES


@pytest.mark.parametrize("order", [[1, 2], [0, 2], [0, 0], [0, 2, 1], [0, 1, 3]], ids=str)
def test_a_lost_repeated_or_moved_message_is_noticed(order: list[int]) -> None:
    elements = sealed()
    with pytest.raises(CorruptFrame, match="missing"):
        opened([elements[index] for index in order])


def test_what_is_kept_elsewhere_is_checked_and_typed() -> None:
    data = encode_sealed(Drain(Epoch(7)))
    assert decode_sealed(data, Drain) == Drain(Epoch(7))
    for wrong in (data[:-1], b"", data[:9] + bytes((data[9] ^ 1,)) + data[10:]):
        with pytest.raises(InvalidRequest):
            decode_sealed(wrong, Drain)
    with pytest.raises(InvalidRequest):
        decode_sealed(data, Ack)


@pytest.mark.anyio
async def test_a_quiet_stream_beats_and_its_source_is_closed_at_the_end() -> None:
    closed, release = [], asyncio.Event()

    async def source():
        try:
            yield 1
            await release.wait()
            yield 2
            await asyncio.Event().wait()
        finally:
            closed.append(True)

    beats = with_beats(source(), every_s=0.01)
    assert [await anext(beats), await anext(beats), await anext(beats)] == [1, None, None]
    release.set()
    while (item := await anext(beats)) is None:
        pass
    assert item == 2
    await beats.aclose()
    assert closed == [True]

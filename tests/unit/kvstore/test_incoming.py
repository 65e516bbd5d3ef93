"""What a puller believes: streams as they should be, and every way to damage one."""

import os

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from common.errors import CorruptFrame
from common.ids import BlockId, TransferId
from common.messages import End, Handover, KvFrame, PullItem, SampledToken
from common.wire import decode_pull_item, encode_pull_item, payload_checksum
from kvstore.incoming import Incoming, check_bytes

BLOCK, BYTES = 4, 24
ID = TransferId("t")
TABLE = [BlockId(number) for number in (7, 3, 5, 1)]
SOURCE = os.urandom(4 * BYTES)


def frame(seq: int, token_start: int, token_end: int, /, **changes: object) -> KvFrame:
    first, past = token_start // BLOCK, -(-token_end // BLOCK)
    payload = SOURCE[first * BYTES : past * BYTES]
    whole = KvFrame(
        ID,
        seq,
        token_start,
        token_end,
        tuple(BlockId(n) for n in range(first, past)),
        payload_checksum((payload,)),
        payload,
    )
    return msgspec.structs.replace(whole, **changes)


def handover(num_tokens: int, *, has_kv: bool = True) -> Handover:
    return Handover(ID, num_tokens, (SampledToken(0, 9),), cached_tokens=0, has_kv=has_kv)


GOOD: list[PullItem] = [frame(0, 0, 8), frame(1, 8, 12), handover(14), frame(2, 12, 14), End(ID, 3)]


class Received:
    """An Incoming with the memory that its frames go to."""

    def __init__(self, have_tokens: int = 0, table: list[BlockId] = TABLE) -> None:
        self.incoming = Incoming(ID, have_tokens, table, BLOCK, BYTES)
        self.memory: dict[BlockId, bytes] = {}

    def take(self, item: PullItem) -> None:
        match item:
            case KvFrame():
                block_ids = self.incoming.check_frame(item)
                check_bytes(item, (item.payload,))
                for index, block_id in enumerate(block_ids):
                    self.memory[block_id] = bytes(item.payload[index * BYTES : (index + 1) * BYTES])
                self.incoming.take_frame(item)
            case Handover():
                self.incoming.take_handover(item)
            case End():
                self.incoming.take_end(item)

    def take_all(self, items: list[PullItem]) -> None:
        for item in items:
            self.take(item)

    def assert_valid_prefix(self, have_tokens: int = 0) -> None:
        """Every block up to ``num_tokens`` holds the source's bytes."""
        for index in range(have_tokens // BLOCK, -(-self.incoming.num_tokens // BLOCK)):
            assert self.memory[TABLE[index]] == SOURCE[index * BYTES : (index + 1) * BYTES]


def test_a_good_stream_fills_the_table_in_order():
    received = Received()
    received.take_all(GOOD)
    assert received.incoming.is_complete
    assert received.incoming.num_tokens == 14
    assert received.incoming.handover == handover(14)
    assert received.memory == {
        block_id: SOURCE[index * BYTES : (index + 1) * BYTES] for index, block_id in enumerate(TABLE)
    }


def test_a_stream_may_start_behind_what_is_there():
    received = Received(have_tokens=8)
    received.take_all([handover(14), frame(0, 8, 14), End(ID, 1)])
    assert received.incoming.is_complete
    received.assert_valid_prefix(have_tokens=8)
    assert set(received.memory) == {5, 1}


@pytest.mark.parametrize("table", [TABLE, []])
def test_nothing_moves_when_all_tokens_are_there(table: list[BlockId]):
    received = Received(have_tokens=14, table=table)
    received.take_all([handover(14), End(ID, 0)])
    assert received.incoming.is_complete
    assert received.memory == {}


def test_nothing_more_comes_when_the_token_ends_the_answer():
    received = Received()
    received.take_all([frame(0, 0, 8), handover(14, has_kv=False), End(ID, 1)])
    assert received.incoming.is_complete
    assert received.incoming.num_tokens == 8


@pytest.mark.parametrize(
    ("items", "complaint"),
    [
        ([frame(0, 0, 8, transfer_id="other")], "another transfer"),
        ([frame(1, 0, 8)], "frame 1 came where frame 0 was due"),
        ([frame(0, 0, 8), frame(0, 0, 8)], "frame 0 came where frame 1 was due"),
        ([frame(0, 4, 8)], "starts at token 4, not at 0"),
        ([frame(0, 0, 8), frame(1, 0, 8)], "starts at token 0, not at 8"),
        ([frame(0, 0, 8), frame(1, 12, 16)], "starts at token 12, not at 8"),
        ([frame(0, 0, 8, token_end=0)], "ends at token 0"),
        ([frame(0, 0, 16, token_end=20)], "the table ends at 16"),
        ([frame(0, 0, 8, token_end=7)], "ends inside a block"),
        ([handover(14), frame(0, 0, 8, token_end=7)], "ends inside a block"),
        ([handover(14), frame(0, 0, 16)], "past the prompt's 14"),
        ([frame(0, 0, 8, token_end=12)], "its tokens take 3 blocks"),
        ([frame(0, 0, 8, token_end=4)], "its tokens take 1 blocks"),
        ([frame(0, 0, 8, block_ids=(0,))], "48 bytes in 1 blocks"),
        ([frame(0, 0, 8, payload=SOURCE[:47])], "47 bytes"),
        ([frame(0, 0, 8, payload=SOURCE[1:49])], "checksum of frame 0"),
        ([frame(0, 0, 8, checksum=0)], "checksum of frame 0"),
        ([handover(17)], "covers 17 tokens"),
        ([frame(0, 0, 8), handover(7)], "covers 7 tokens, 8 are here"),
        ([handover(14), handover(14)], "second handover"),
        ([msgspec.structs.replace(handover(14), transfer_id="other")], "another transfer"),
        ([End(ID, 0)], "without a handover"),
        ([frame(0, 0, 8), handover(14), End(ID, 1)], "ended at token 8 of 14"),
        ([*GOOD[:-1], End(ID, 2)], "2 frames were sent and 3 came"),
        ([*GOOD, End(ID, 3)], "after the end"),
        ([*GOOD, frame(3, 14, 15)], "after the end"),
    ],
)
def test_a_damaged_stream_is_refused_at_the_first_wrong_element(items: list[PullItem], complaint: str):
    received = Received()
    received.take_all(items[:-1])
    with pytest.raises(CorruptFrame, match=complaint):
        received.take(items[-1])
    received.assert_valid_prefix()


def announced(item: KvFrame) -> KvFrame:
    return msgspec.structs.replace(item, payload=None)


def test_a_frame_may_be_announced_without_its_bytes():
    received = Received()
    item = announced(frame(0, 0, 8))
    assert decode_pull_item(encode_pull_item(item)) == item
    assert received.incoming.check_frame(item) == tuple(TABLE[:2])
    check_bytes(item, (SOURCE[:BYTES], SOURCE[BYTES : 2 * BYTES]))
    with pytest.raises(CorruptFrame, match="checksum of frame 0"):
        check_bytes(item, (SOURCE[BYTES : 3 * BYTES],))


@pytest.mark.parametrize(
    ("item", "kind"), [(frame(0, 0, 8), b"A"), (announced(frame(0, 0, 8)), b"F")], ids=["with bytes", "without"]
)
def test_a_frame_of_the_wrong_kind_is_refused(item: KvFrame, kind: bytes):
    with pytest.raises(CorruptFrame):
        Received().take(decode_pull_item(kind + encode_pull_item(item)[1:]))


def test_a_second_stream_goes_on_behind_the_first_and_may_repeat_its_handover():
    received = Received()
    received.take_all([frame(0, 0, 8), handover(14)])
    received.incoming.begin_again()
    assert not received.incoming.take_handover(handover(14))
    received.take_all([frame(0, 8, 14), End(ID, 1)])
    assert received.incoming.is_complete
    received.assert_valid_prefix()


@pytest.mark.parametrize("told", [[], [handover(14)]], ids=["another", "twice the same"])
def test_a_second_stream_may_not_bring_another_handover(told: list[Handover]):
    received = Received()
    received.take_all([frame(0, 0, 8), handover(14)])
    received.incoming.begin_again()
    received.take_all(told)
    with pytest.raises(CorruptFrame, match="second handover"):
        received.incoming.take_handover(handover(14 if told else 15))


edits = st.one_of(
    st.tuples(st.just("drop"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("repeat"), st.integers(0, 4), st.just(0)),
    st.tuples(st.just("swap"), st.integers(0, 4), st.integers(0, 4)),
    st.tuples(st.just("flip"), st.integers(0, 4), st.integers(0, 8 * 200)),
    st.tuples(st.just("cut"), st.integers(0, 4), st.integers(0, 200)),
    st.tuples(st.just("short"), st.integers(0, 4), st.just(0)),
)


def damage(stream: list[bytes], kind: str, at: int, by: int) -> list[bytes]:
    """Return ``stream`` after one accident."""
    stream = stream.copy()
    at %= max(1, len(stream))
    match kind:
        case "short":
            return stream[:at]
        case "drop":
            del stream[at : at + 1]
        case "repeat":
            stream.insert(at, stream[at])
        case "swap":
            other = by % len(stream)
            stream[at], stream[other] = stream[other], stream[at]
        case "cut":
            stream[at] = stream[at][: by % len(stream[at])]
        case "flip":
            changed = bytearray(stream[at])
            bit = by % (8 * len(changed))
            changed[bit // 8] ^= 1 << bit % 8
            stream[at] = bytes(changed)
    return stream


@settings(deadline=None, max_examples=500)
@given(edits)
def test_after_one_accident_only_a_valid_prefix_is_believed(edit: tuple[str, int, int]):
    whole = [encode_pull_item(item) for item in GOOD]
    stream = damage(whole, *edit)
    received = Received()
    try:
        received.take_all([decode_pull_item(data) for data in stream])
    except CorruptFrame:
        pass
    received.assert_valid_prefix()
    assert received.incoming.handover in (None, handover(14))
    if received.incoming.is_complete and stream[: len(whole)] != whole:
        assert stream_is_reordered_harmlessly(stream, whole)


def stream_is_reordered_harmlessly(stream: list[bytes], whole: list[bytes]) -> bool:
    """The handover may come anywhere before the frame with the last, partly filled block."""
    return [data for data in stream if data != whole[2]] == [data for data in whole if data != whole[2]]

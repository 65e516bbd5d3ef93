"""Tokens to pieces of text: any cutting of the tokens gives the text that the whole answer gives."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import FinishReason, SamplingParams
from gateway.text.detokenizer import detokenizer_factory
from gateway.text.text_stream import Piece, TextStream
from tests.support import tiny_tokenizers

TOKENIZER = tiny_tokenizers.byte_level()
MAKE = detokenizer_factory(TOKENIZER)
EOS = 2
SAMPLING = SamplingParams(64, eos_token_ids=(EOS,))


def run(token_ids: list[int], sizes: list[int], stops: list[str], finish: FinishReason) -> list[Piece]:
    """Feed ``token_ids`` in pieces of ``sizes``, then one by one, until a piece finishes."""
    stream = TextStream(MAKE(False), stops, SAMPLING)
    parts, rest = [], tuple(token_ids)
    for size in itertools.chain(sizes, itertools.repeat(1)):
        parts.append(rest[:size])
        rest = rest[size:]
        if not rest:
            break
    pieces: list[Piece] = []
    for n, part in enumerate(parts, 1):
        pieces.append(stream.feed(part, finish if n == len(parts) else None))
        if pieces[-1].finish is not None:
            break
    return pieces


tokens = st.lists(st.integers(0, TOKENIZER.get_vocab_size() - 1).filter(lambda token_id: token_id != EOS), max_size=30)
cuts = st.lists(st.integers(1, 4), max_size=6)
strings = st.lists(st.sampled_from(["th", "e", " is", "an", "\ufffd", "ab", "é"]), max_size=3, unique=True)


@settings(max_examples=200)
@given(tokens, cuts, strings, st.sampled_from(FinishReason))
def test_pieces_joined_are_the_answer_up_to_its_first_stop_string(
    token_ids: list[int], sizes: list[int], stops: list[str], finish: FinishReason
) -> None:
    all_ids = [*token_ids, EOS] if finish is FinishReason.STOP else [*token_ids, 5]
    whole = TOKENIZER.decode(all_ids)
    pieces = run(all_ids, sizes, stops, finish)
    ends = sorted((whole.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in whole)
    text = "".join(piece.text for piece in pieces)
    if ends:
        end, _, stop = ends[0]
        assert text == whole[: end - len(stop)]
        assert (pieces[-1].finish, pieces[-1].stop_reason) == (FinishReason.STOP, stop)
    else:
        assert text == whole
        assert (pieces[-1].finish, pieces[-1].stop_reason) == (finish, None)
        assert [token_id for piece in pieces for token_id in piece.token_ids] == all_ids


def test_an_end_token_in_the_middle_has_no_text_and_does_not_end() -> None:
    pieces = run([*TOKENIZER.encode("a").ids, EOS, *TOKENIZER.encode("b").ids], [], [], FinishReason.LENGTH)
    assert "".join(piece.text for piece in pieces) == "ab"
    assert pieces[-1].finish is FinishReason.LENGTH


def test_only_the_tokens_up_to_a_stop_string_are_in_the_piece() -> None:
    token_ids = tuple(TOKENIZER.encode("one. two").ids)
    piece = TextStream(MAKE(False), ["."], SAMPLING).feed(token_ids, None)
    assert piece.text == "one"
    assert TOKENIZER.decode(list(piece.token_ids)) == "one."


def test_with_its_stop_string_if_that_is_asked_for() -> None:
    stream = TextStream(MAKE(False), ["."], SAMPLING, includes_stop=True)
    assert stream.feed(tuple(TOKENIZER.encode("one. two").ids), None).text == "one."


def test_a_stop_token_is_named_and_has_text_only_if_that_is_asked_for() -> None:
    (stop_id,) = TOKENIZER.encode(".").ids
    token_ids = tuple(TOKENIZER.encode("one.").ids)
    sampling = SamplingParams(64, eos_token_ids=(EOS,), stop_token_ids=(stop_id,))
    for includes_stop, text in ((False, "one"), (True, "one.")):
        piece = TextStream(MAKE(False), [], sampling, includes_stop=includes_stop).feed(token_ids, FinishReason.STOP)
        assert (piece.text, piece.stop_reason) == (text, stop_id)
    silent = TextStream(MAKE(False), [], sampling, includes_stop=True).feed((*token_ids[:-1], EOS), FinishReason.STOP)
    assert (silent.text, silent.stop_reason) == ("one", None)


def test_stop_strings_are_looked_for_after_min_tokens_only() -> None:
    token_ids = tuple(TOKENIZER.encode("a. b. c").ids)
    stream = TextStream(MAKE(False), ["."], SamplingParams(64, min_tokens=len(TOKENIZER.encode("a.").ids)))
    assert stream.feed(token_ids, None).text == "a. b"


def test_a_token_that_completes_a_structure_is_written_and_one_that_only_ends_the_answer_is_not() -> None:
    word = tuple(TOKENIZER.encode("the end").ids)
    stopping = SamplingParams(64, eos_token_ids=(EOS,), stop_token_ids=(word[-1],))
    for stops in ([], ["never"]):
        complete = TextStream(MAKE(False), stops, SAMPLING).feed(word, FinishReason.STOP)
        assert (complete.text, complete.stop_reason) == ("the end", None)
        ended = TextStream(MAKE(False), stops, SAMPLING).feed((*word, EOS), FinishReason.STOP)
        assert (ended.text, ended.stop_reason) == ("the end", None)
        stopped = TextStream(MAKE(False), stops, stopping).feed(word, FinishReason.STOP)
        assert (stopped.text, stopped.stop_reason) == (TOKENIZER.decode(word[:-1]), word[-1])

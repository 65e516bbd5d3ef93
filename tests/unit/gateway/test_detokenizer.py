"""The detokenizer: pieces joined are the whole decode, whatever the tokens and however they are cut."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from gateway.text.detokenizer import (
    MAX_BYTE_RUN,
    REPLACEMENT,
    ByteLevelDetokenizer,
    Detokenizer,
    detokenizer_factory,
)
from tests.support import tiny_tokenizers

BUILDERS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": tiny_tokenizers.byte_level,
    "byte-level with prefix space": lambda: tiny_tokenizers.byte_level(add_prefix_space=True),
    "sentencepiece": tiny_tokenizers.sentencepiece,
    "sentencepiece without strip": lambda: tiny_tokenizers.sentencepiece(strip=False),
    "metaspace always": lambda: tiny_tokenizers.metaspace("always"),
    "metaspace first": lambda: tiny_tokenizers.metaspace("first"),
    "metaspace never": lambda: tiny_tokenizers.metaspace("never"),
}
TOKENIZERS = {name: build() for name, build in BUILDERS.items()}
TEXTS = [
    "The capital of France is Paris.",
    "  two spaces, a\ttab\nand a line ",
    "👩‍👩‍👧‍👦 family, 한국어, हिन्दी, 日本語, café",
    "\ufffd was in the text",
]


def pieces(detokenizer: Detokenizer, token_ids: list[int], sizes: list[int]) -> list[str]:
    """Feed ``token_ids`` in pieces of ``sizes``, then one by one, and flush."""
    found, at = [], 0
    for size in sizes:
        found.append(detokenizer.feed(token_ids[at : at + size]))
        at += size
    found += [detokenizer.feed([token_id]) for token_id in token_ids[at:]]
    return [*found, detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=40)
@given(data=st.data())
def test_pieces_joined_are_the_whole_decode_of_random_tokens(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=60))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=8))
    detokenizer = detokenizer_factory(tokenizer)(None)
    assert "".join(pieces(detokenizer, token_ids, sizes)) == tokenizer.decode(token_ids)


@given(data=st.binary(max_size=80), sizes=st.lists(st.integers(0, 5), max_size=8))
def test_byte_tokens_of_any_value_decode_as_a_whole(data: bytes, sizes: list[int]) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    token_ids = [3 + byte for byte in data]
    detokenizer = detokenizer_factory(tokenizer)(None)
    assert "".join(pieces(detokenizer, token_ids, sizes)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_comes_back_without_replacement_characters(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    found = pieces(detokenizer_factory(tokenizer)(None), token_ids, [])
    assert "".join(found) == tokenizer.decode(token_ids)
    if not name.startswith("metaspace"):  # its vocabulary lacks characters, so unknown tokens stand for them
        assert "".join(found).strip() == text.strip()
        assert "".join(found).count(REPLACEMENT) == text.count(REPLACEMENT)


def test_an_incomplete_character_is_held_and_flushed_once() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    token_ids = [token_id for character in "Ġð" for token_id in [tokenizer.token_to_id(character)]]
    detokenizer = detokenizer_factory(tokenizer)(None)
    assert detokenizer.feed(token_ids) == " "
    assert detokenizer.flush() == REPLACEMENT
    assert detokenizer.flush() == ""


def test_special_tokens_have_no_text_and_other_added_tokens_do() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<think>", "⟦tool⟧", "<|endoftext|>")]
    assert "".join(pieces(detokenizer_factory(tokenizer)(None), ids, [])) == "<think>⟦tool⟧"


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace always"])
def test_an_answer_that_continues_a_text_keeps_its_leading_space(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    token_ids = tokenizer.encode("Paris is", add_special_tokens=False).ids
    make = detokenizer_factory(tokenizer)
    assert "".join(pieces(make(None), token_ids, [])) == "Paris is"
    assert "".join(pieces(make([]), token_ids, [])) == " Paris is"


EMOJI = "😀"


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "sentencepiece without strip"])
@pytest.mark.parametrize("known", [1, 2, 3])
@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_of_a_character_that_the_prompt_began_nothing_comes_out(name: str, known: int, written: int) -> None:
    tokenizer = TOKENIZERS[name]
    emoji = [byte_token(tokenizer, byte) for byte in EMOJI.encode()]
    missing = emoji[known : known + written]
    after = tokenizer.encode("ok", add_special_tokens=False).ids
    make = detokenizer_factory(tokenizer)
    answer = "".join(pieces(make([*after, *emoji[:known]]), [*missing, *after, *emoji], [1, 3]))
    assert answer == tokenizer.decode([*after, *after, *emoji]).removeprefix(tokenizer.decode(after))


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_stray_bytes_after_a_complete_character_are_bad_bytes(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    emoji = [byte_token(tokenizer, byte) for byte in EMOJI.encode()]
    make = detokenizer_factory(tokenizer)
    assert "".join(pieces(make(emoji), [emoji[3]], [])) == REPLACEMENT
    assert "".join(pieces(make(emoji[:3]), [emoji[3], emoji[3]], [])) == REPLACEMENT


def byte_token(tokenizer: Tokenizer, byte: int) -> int:
    """Return the token of one byte."""
    characters = {0xF0: "ð", 0x9F: "Ł", 0x98: "ĺ", 0x80: "Ģ"}
    found = tokenizer.token_to_id(f"<0x{byte:02X}>")
    found = tokenizer.token_to_id(characters[byte]) if found is None else found
    assert found is not None
    return found


def test_a_long_run_of_byte_tokens_is_not_held_for_ever() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    text = "བོད" * 40
    token_ids = [3 + byte for byte in text.encode()]
    detokenizer = detokenizer_factory(tokenizer)(None)
    early = detokenizer.feed(token_ids)
    assert len(token_ids) > MAX_BYTE_RUN
    assert text.startswith(early)
    assert len(early.encode()) > len(token_ids) - MAX_BYTE_RUN
    assert early + detokenizer.flush() == text


def test_a_decoder_that_is_a_sequence_of_one_is_that_one() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert isinstance(detokenizer_factory(tokenizer)(None), ByteLevelDetokenizer)


def test_a_tokenizer_of_another_kind_is_decoded_in_a_window() -> None:
    tokenizer = tiny_tokenizers.word_level()
    token_ids = tokenizer.encode("the unknowns house !", add_special_tokens=False).ids
    token_ids.insert(2, tokenizer.token_to_id("</s>"))
    found = pieces(detokenizer_factory(tokenizer)(None), token_ids, [])
    assert "".join(found) == tokenizer.decode(token_ids) == "the unknowns house !"

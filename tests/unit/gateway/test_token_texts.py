"""What single tokens are called: their bytes joined are the text, and no two names are equal."""

import pytest
from tokenizers import Tokenizer

from gateway.text.token_texts import TokenTexts
from tests.support import tiny_tokenizers

TOKENIZERS = {"byte-level": tiny_tokenizers.byte_level(), "sentencepiece": tiny_tokenizers.sentencepiece()}
TEXT = "The capital of France: 👩‍👩‍👧‍👦 日本語, café"


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_bytes_of_tokens_joined_are_their_text(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(map(texts.data, token_ids)).decode().strip() == TEXT


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_part_of_a_character_has_a_name_of_its_own(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    parts = [token_id for token_id in range(tokenizer.get_vocab_size()) if texts.text(token_id).startswith("bytes:")]
    assert len(parts) >= 128
    assert len({texts.text(token_id) for token_id in parts}) == len(parts)


def test_special_tokens_are_named_as_they_are_written_and_are_silent_in_texts() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    texts, token_id = TokenTexts(tokenizer), tokenizer.token_to_id("<|im_end|>")
    assert (texts.text(token_id), texts.is_silent(token_id)) == ("<|im_end|>", True)
    assert not texts.is_silent(tokenizer.token_to_id("<think>"))

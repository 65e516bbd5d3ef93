"""Tokens to text, piece by piece: the pieces joined are what decoding all tokens at once gives.

A tokenizer's ``decoder`` says how its tokens become text, and three kinds are told apart: byte-level BPE (each token is
some bytes of UTF-8), sentencepiece style (each token is some text, with byte tokens for what the vocabulary lacks), and
anything else (decoded again in a sliding window). No text of the prompt can come out: of a prompt that ends inside a
character, which only tokens can say, the answer's first bytes are dropped up to the end of that character. Bytes that
do not complete a character yet are held back, and come out as U+FFFD only when the model never completes them. Special
tokens have no text.
"""

import codecs
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
"""What stands for bytes that are not UTF-8."""

MAX_BYTE_RUN = 128
"""Byte tokens in a row that are held until the run ends: one bad byte spoils its whole run. Of a longer run, whole
characters come out before it ends."""


class Detokenizer(Protocol):
    """Turns the tokens of one answer into text."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain after these further tokens."""

    def flush(self) -> str:
        """Return the rest; the answer has ended."""


DetokenizerFactory = Callable[[Sequence[int] | None], Detokenizer]
"""Makes the detokenizer of one answer; its argument are the last tokens of a text that the answer continues, and then
keeps the space that a sentencepiece tokenizer would drop from the beginning of one; None for a text of its own."""

MAX_TAIL_TOKENS = 4
"""So many tokens at the end of a prompt hold the beginning of any character that is not complete."""


def detokenizer_factory(tokenizer: Tokenizer, shown: frozenset[str] = frozenset()) -> DetokenizerFactory:
    """Return what makes detokenizers for the answers of one tokenizer.

    Special tokens have no text, but for those in ``shown``, where the tokenizer is of one of the two well-known kinds.
    """
    decoder = _decoder_of(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special and token.content not in shown}
    if decoder is not None and decoder["type"] == "ByteLevel":
        byte_pieces = _BytePieces(tokenizer, special)
        return lambda tail: ByteLevelDetokenizer(byte_pieces, tail or ())
    style = _sentencepiece_style(decoder)
    if style is not None:
        text_pieces = _TextPieces(tokenizer, special, style)
        return lambda tail: SentencePieceDetokenizer(text_pieces, style, tail)
    return lambda tail: WindowDetokenizer(tokenizer)


def num_missing_bytes(data: bytes) -> int:
    """Return how many bytes the character lacks that ``data`` ends in; 0 when it is complete or no character."""
    for length, byte in enumerate(reversed(data[-3:]), 1):
        if byte & 0xC0 != 0x80:  # the first byte of a character says how long it is
            size = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
            return max(0, size - length)
    return 0


def _num_continued(data: Iterable[int], limit: int) -> int:
    """Return how many bytes at the beginning of ``data``, at most ``limit``, only continue a character."""
    count = 0
    for byte in data:
        if count == limit or byte & 0xC0 != 0x80:
            break
        count += 1
    return count


def _decoder_of(tokenizer: Tokenizer) -> dict[str, Any] | None:
    """Return the decoder as tokenizer.json describes it; of a sequence of one, that one."""
    decoder: dict[str, Any] | None = json.loads(tokenizer.to_str()).get("decoder")
    if decoder is not None and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        first: dict[str, Any] = decoder["decoders"][0]
        return first
    return decoder


def token_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    """Return what says which bytes one token adds to a text, special tokens included."""
    decoder = _decoder_of(tokenizer)
    if decoder is not None and decoder["type"] == "ByteLevel":
        return _BytePieces(tokenizer, set()).__getitem__
    style = _sentencepiece_style(decoder)
    if style is not None:
        return _TextPieces(tokenizer, set(), style).data
    return lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False).encode()


# ---- byte-level BPE ----------------------------------------------------------------------------


class ByteLevelDetokenizer:
    """Every token is a string of bytes."""

    def __init__(self, pieces: "_BytePieces", tail: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._pending = b""
        self._num_foreign = num_missing_bytes(b"".join([pieces[token_id] for token_id in tail]))
        """Bytes that the answer may write of the prompt's last character."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain after these further tokens."""
        pieces = self._pieces
        data = self._pending + b"".join([pieces[token_id] for token_id in token_ids])
        if self._num_foreign and data:
            data = self._without_foreign(data)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """Return the rest; the answer has ended."""
        data, self._pending = self._pending, b""
        return data.decode("utf-8", "replace")

    def _without_foreign(self, data: bytes) -> bytes:
        dropped = _num_continued(data, self._num_foreign)
        self._num_foreign = self._num_foreign - dropped if dropped == len(data) else 0
        return data[dropped:]


class _BytePieces(dict[int, bytes]):
    """The bytes of each token, looked up once."""

    def __init__(self, tokenizer: Tokenizer, special: set[int]) -> None:
        super().__init__(dict.fromkeys(special, b""))
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        self[token_id] = piece = b"" if token is None else _token_bytes(token)
        return piece


def _token_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token, written as it is
        return token.encode()


def _byte_characters() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for (GPT-2's table).

    Printable bytes of Latin-1 stand for themselves, the others for the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()

# ---- sentencepiece style -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Style:
    """How a sentencepiece-style decoder writes its tokens."""

    replacements: tuple[tuple[str, str], ...] = ()
    """(what, by what) in each token, in order; usually U+2581 by a space."""
    byte_fallback: bool = False
    """``<0xE6>`` stands for a byte."""
    strip_start: int = 0
    """Spaces dropped from the beginning of the text at most."""
    strip_text: str = " "
    """The character that ``strip_start`` drops."""
    first_token_drop: str = ""
    """A character dropped from the text's first token, wherever it stands in it."""


def _sentencepiece_style(decoder: dict[str, Any] | None) -> _Style | None:
    """Return the style of a decoder as tokenizer.json describes it, or None when it is of another kind."""
    if decoder is None:
        return None
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    names = [step["type"] for step in steps]
    by_name = dict(zip(names, steps, strict=True))
    match names:
        case ["Metaspace"] | ["Metaspace", "Fuse"]:
            metaspace = by_name["Metaspace"]
            drop = "" if metaspace.get("prepend_scheme", "always") == "never" else metaspace["replacement"]
            return _Style(((metaspace["replacement"], " "),), first_token_drop=drop)
        case ["Replace", "ByteFallback", "Fuse"] | ["Replace", "ByteFallback", "Fuse", "Strip"]:
            pattern = by_name["Replace"]["pattern"].get("String")
            strip = by_name.get("Strip", {"start": 0, "stop": 0, "content": " "})
            if pattern is None or strip["stop"] != 0:
                return None
            replacement = (pattern, by_name["Replace"]["content"])
            return _Style((replacement,), True, strip["start"], strip["content"])
    return None


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one token is: a text (maybe empty, for a special or unknown token), or a byte."""

    text: str
    first_text: str
    """The same as the first token of a text."""
    byte: int | None = None
    special: bool = False


class _TextPieces(dict[int, _Piece]):
    """The piece of each token, looked up once."""

    def __init__(self, tokenizer: Tokenizer, special: set[int], style: _Style) -> None:
        super().__init__(dict.fromkeys(special, _Piece("", "", special=True)))
        self._tokenizer = tokenizer
        self._style = style

    def __missing__(self, token_id: int) -> _Piece:
        token = self._tokenizer.id_to_token(token_id)
        self[token_id] = piece = _Piece("", "", special=True) if token is None else self._piece(token)
        return piece

    def data(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to a text that has begun."""
        piece = self[token_id]
        return piece.text.encode() if piece.byte is None else bytes([piece.byte])

    def _piece(self, token: str) -> _Piece:
        style = self._style
        first = token.replace(style.first_token_drop, "") if style.first_token_drop else token
        for what, by_what in style.replacements:
            token, first = token.replace(what, by_what), first.replace(what, by_what)
        return _Piece(token, first, _byte_of(token) if style.byte_fallback else None)


def _byte_run(pieces: Sequence[_Piece]) -> bytes:
    """Return the bytes of the byte tokens at the end of ``pieces``."""
    run = bytearray()
    for piece in reversed(pieces):
        if piece.byte is None:
            break
        run.append(piece.byte)
    return bytes(reversed(run))


def _byte_of(token: str) -> int | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


class SentencePieceDetokenizer:
    """Every token is a string of text or one byte; a run of byte tokens is text if all of it is UTF-8."""

    def __init__(self, pieces: _TextPieces, style: _Style, tail: Sequence[int] | None) -> None:
        self._pieces = pieces
        self._is_first = tail is None
        self._to_strip = style.strip_start if tail is None else 0
        self._num_foreign = num_missing_bytes(_byte_run([pieces[token_id] for token_id in tail or ()]))
        """Bytes that the answer may write of the prompt's last character."""
        self._strip_text = style.strip_text
        self._run = bytearray()
        self._run_is_cut = False

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain after these further tokens."""
        parts: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if piece.special:
                continue
            if piece.byte is not None:
                if self._num_foreign and _num_continued((piece.byte,), 1):
                    self._num_foreign -= 1
                    continue
                self._run.append(piece.byte)
                if len(self._run) > MAX_BYTE_RUN:
                    parts.append(self._cut_run())
            else:
                if self._run:
                    parts.append(self._end_run())
                parts.append(piece.first_text if self._is_first else piece.text)
            self._is_first = False
            self._num_foreign = 0
        return self._strip("".join(parts))

    def flush(self) -> str:
        """Return the rest; the answer has ended."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        data, was_cut = bytes(self._run), self._run_is_cut
        self._run.clear()
        self._run_is_cut = False
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data.decode("utf-8", "replace") if was_cut else REPLACEMENT * len(data)

    def _cut_run(self) -> str:
        """Return the whole characters of a run that has become too long to hold."""
        text, used = codecs.utf_8_decode(bytes(self._run), "replace", False)
        del self._run[:used]
        self._run_is_cut = True
        return text

    def _strip(self, text: str) -> str:
        while self._to_strip and text:
            if not text.startswith(self._strip_text):
                self._to_strip = 0
                break
            text = text[len(self._strip_text) :]
            self._to_strip -= 1
        return text


# ---- anything else -----------------------------------------------------------------------------


class WindowDetokenizer:
    """Decodes the last tokens again with every further one, and returns by how much their text grew."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._start = 0
        self._sent = 0

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain after these further tokens."""
        return "".join([self._feed_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """Return the rest; the answer has ended."""
        return self._grown()

    def _feed_one(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        if self._decode(self._token_ids[self._start :]).endswith(REPLACEMENT):
            return ""
        return self._grown()

    def _grown(self) -> str:
        before = self._decode(self._token_ids[self._start : self._sent])
        text = self._decode(self._token_ids[self._start :])[len(before) :]
        if text:
            self._start, self._sent = self._sent, len(self._token_ids)
        return text

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

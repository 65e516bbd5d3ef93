"""Text to tokens: prompts as the tokenizer's own post-processor says, chats through the model's template.

A special token that a client wrote into a message is encoded as text. Where a message holds such a text, a private-use
character stands for it while the template runs; the stretch around it, up to the template's own special tokens, is then
encoded by a twin of the tokenizer that knows no special tokens. Messages without such a text are encoded as always.
Long texts are encoded, and templates rendered, on a thread, so that the event loop is never held up.
"""

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import tokenizers

from common.errors import ConfigError, InvalidRequest
from gateway.errors import ContextLengthExceeded
from gateway.text.chat_template import ChatMessage, ChatPrompt, ChatTemplate
from gateway.text.detokenizer import MAX_TAIL_TOKENS, Detokenizer, detokenizer_factory
from gateway.text.model_files import ModelFiles
from gateway.text.token_texts import TokenTexts

INLINE_CHARACTERS = 1024
"""Texts up to this length are encoded where they are, in well under a millisecond."""

NORMALISER_SLACK = 4
"""Unicode composition makes at most this many characters one."""

MAX_TAIL_SPACE = 8
"""Tokens of white space that may follow the last mark of a prompt."""

MAX_ECHO = 200
"""Characters of what is wrong with a client's template that it is told."""

_STANDINS = range(0xF0000, 0xFFF00, 0x100)
"""Where private-use characters that stand for special tokens may begin."""

Result = TypeVar("Result")


class Tokenizer:
    """A model's tokenizer and chat template. Owns its two threads; lives until :meth:`close`."""

    def __init__(self, files: ModelFiles) -> None:
        self._tokenizer = _load(files.tokenizer_json)
        self._plain = _load(files.tokenizer_json)
        self._plain.encode_special_tokens = True
        self._specials = _SpecialTokens(self._tokenizer)
        self._added = {token.content: n for n, token in self._tokenizer.get_added_tokens_decoder().items()}
        self._template = None
        if files.chat_template is not None:
            self._template = ChatTemplate(files.chat_template, files.special_tokens)
        self.names = TokenTexts(self._tokenizer)
        """What single tokens are called."""
        self._special_tokens = files.special_tokens
        self._make_detokenizer = {frozenset[str](): detokenizer_factory(self._tokenizer)}
        self._prefix = self._tokenizer.encode("").ids
        self._longest_token = _longest_token(self._tokenizer)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self.eos_token_ids = files.eos_token_ids
        self.special_tokens = self._specials.texts
        self.vocab_size = files.vocab_size

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def chat_template(self) -> str:
        """Source of the model's chat template; empty without one."""
        return "" if self._template is None else self._template.source

    def detokenizer(
        self, *, continues: Sequence[int] | None = None, shown: frozenset[str] = frozenset()
    ) -> Detokenizer:
        """Return a detokenizer for one answer; ``continues`` is the prompt when it goes on with a text of the client's.

        Special tokens have no text, but for those in ``shown``.
        """
        if shown not in self._make_detokenizer:
            self._make_detokenizer[shown] = detokenizer_factory(self._tokenizer, shown)
        return self._make_detokenizer[shown](None if continues is None else continues[-MAX_TAIL_TOKENS:])

    async def encode_prompt(self, text: str, max_model_len: int, *, adds_special: bool = True) -> list[int]:
        """Return the tokens of a raw prompt, with what the post-processor adds, if wanted; a BOS is never doubled.

        Raises InvalidRequest when ``text`` is certainly longer than ``max_model_len`` tokens.
        """
        self._check_length(len(text), max_model_len, "prompt")
        return await self._run(len(text), lambda: self._encode_prompt(text) if adds_special else self._encode(text))

    async def encode_chat(self, messages: Sequence[ChatMessage], max_model_len: int) -> list[int]:
        """Return the tokens of a conversation without tools; raises as :meth:`encode_chat_prompt`."""
        return await self.encode_chat_prompt(ChatPrompt.of(messages), max_model_len)

    async def encode_chat_prompt(
        self, prompt: ChatPrompt, max_model_len: int, template: str | None = None
    ) -> list[int]:
        """Return the tokens of ``prompt`` through ``template``, which is the model's if none is given.

        Raises InvalidRequest when the model has no template, when the template is wrong or refuses the prompt, or when
        that is certainly longer than ``max_model_len`` tokens.
        """
        if self._template is None and template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions", param="messages")
        self._check_length(_num_characters(prompt.messages), max_model_len, "messages")
        self._check_length(_num_characters(prompt.tools), max_model_len, "tools")
        return await self._on_thread(lambda: self._encode_chat(self._template_of(template), prompt))

    def ends_with(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether a prompt's last characters, but for white space, are ``text``."""
        tail = list(token_ids[-len(text) - MAX_TAIL_SPACE :])
        return bool(self._tokenizer.decode(tail, skip_special_tokens=False).rstrip().endswith(text))

    def added_token_id(self, text: str) -> int | None:
        """Return the token that is always written for ``text``; None when there is none."""
        return self._added.get(text)

    async def decode(self, token_ids: list[int]) -> str:
        """Return the text of ``token_ids``, special tokens included."""
        return await self._run(len(token_ids), lambda: self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary writes it; empty for ids that it lacks."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return what ``token_ids`` say, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def first_words(self, token_ids: Sequence[int], max_characters: int = 80) -> str:
        """Return the beginning of what ``token_ids`` say, in one line, for people."""
        return " ".join(self.text_of(token_ids).split())[:max_characters]

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the ways to write each of ``words``, at the beginning of a text and after a space, as tokens."""
        forms = [form for word in words for form in (word, " " + word.lstrip(" "))]
        encoded = [tuple(self._plain.encode(form, add_special_tokens=False).ids) for form in forms]
        return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))

    async def _run(self, num_characters: int, work: Callable[[], Result]) -> Result:
        if num_characters <= INLINE_CHARACTERS:
            return work()
        return await self._on_thread(work)

    async def _on_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _template_of(self, source: str | None) -> ChatTemplate:
        if source is None:
            assert self._template is not None
            return self._template
        try:
            return ChatTemplate(source, self._special_tokens)
        except ConfigError as error:
            raise InvalidRequest(error.message[:MAX_ECHO], param="chat_template") from error

    def _check_length(self, num_characters: int, max_model_len: int, param: str) -> None:
        if self._longest_token is None:
            return
        limit = max_model_len * self._longest_token * NORMALISER_SLACK
        if num_characters > limit:
            raise ContextLengthExceeded(
                f"{param} has {num_characters} characters, which is more than {max_model_len} tokens", param=param
            )

    def _encode_prompt(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text).ids
        if self._prefix and token_ids[:2] == [self._prefix[0]] * 2:
            written = self._tokenizer.id_to_token(self._prefix[0])
            return token_ids[1:] if text.startswith(written) else token_ids
        return token_ids

    def _encode_chat(self, template: ChatTemplate, prompt: ChatPrompt) -> list[int]:
        standins = self._specials.standins_for(prompt)
        if standins is None:
            return self._encode(template.render(prompt))
        marked = template.render(prompt.map_text(standins.insert))
        token_ids: list[int] = []
        for stretch in self._specials.stretches(marked, standins):
            if stretch.is_plain:
                token_ids += self._plain.encode(standins.remove(stretch.text), add_special_tokens=False).ids
            else:
                token_ids += self._encode(stretch.text)
        return token_ids

    def _encode(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Part of a rendered prompt."""

    text: str
    is_plain: bool
    """Holds stand-ins: what they stand for is text, not special tokens."""


class _Standins:
    """Which private-use character stands for which special token's text in one request."""

    def __init__(self, by_token: dict[str, str], pattern: re.Pattern[str]) -> None:
        self._by_token = by_token
        self._by_standin = {standin: token for token, standin in by_token.items()}
        self._tokens = pattern
        self._standins = re.compile("[" + "".join(self._by_standin) + "]")

    def insert(self, text: str) -> str:
        """Return ``text`` with stand-ins for special tokens."""
        return self._tokens.sub(lambda match: self._by_token[match[0]], text)

    def remove(self, text: str) -> str:
        """Return ``text`` with special tokens' texts for stand-ins."""
        return self._standins.sub(lambda match: self._by_standin[match[0]], text)

    def are_in(self, text: str) -> bool:
        """Whether ``text`` holds a stand-in."""
        return self._standins.search(text) is not None


class _SpecialTokens:
    """The special tokens of a tokenizer, as texts to look for."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if token.special and token.content]
        texts = sorted({token.content for token in added}, key=len, reverse=True)
        self.texts = tuple(texts)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._eats_left = {token.content for token in added if token.lstrip}
        self._eats_right = {token.content for token in added if token.rstrip}

    def standins_for(self, prompt: ChatPrompt) -> _Standins | None:
        """Return stand-ins for the special tokens that a client wrote in ``prompt``, or None when there are none."""
        if self._pattern is None:
            return None
        found: set[str] = set()
        texts = list(_texts([prompt.messages, prompt.tools, dict(prompt.variables)]))
        for text in texts:
            found.update(self._pattern.findall(text))
        if not found:
            return None
        tokens = sorted(found)
        for start in _STANDINS:
            standins = [chr(start + n) for n in range(len(tokens))]
            if not any(standin in text for text in texts for standin in standins):
                return _Standins(dict(zip(tokens, standins, strict=True)), self._pattern)
        raise InvalidRequest("messages use too many private-use characters", param="messages")

    def stretches(self, text: str, standins: _Standins) -> Iterator[_Stretch]:
        """Cut a rendered prompt, at special tokens, into stretches with stand-ins and what is between them."""
        assert self._pattern is not None
        regular, at, before = "", 0, ""
        for match in [*self._pattern.finditer(text), None]:
            end, token = (len(text), "") if match is None else (match.start(), match[0])
            stretch = text[at:end]
            if standins.are_in(stretch):
                yield _Stretch(regular, False)
                yield _Stretch(self._trimmed(stretch, before, token), True)
                regular = ""
            else:
                regular += stretch
            regular += token
            at, before = end + len(token), token
        yield _Stretch(regular, False)

    def _trimmed(self, stretch: str, before: str, after: str) -> str:
        stretch = stretch.lstrip() if before in self._eats_right else stretch
        return stretch.rstrip() if after in self._eats_left else stretch


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value."""
    match value:
        case str():
            yield value
        case dict():
            for key, item in value.items():
                yield key
                yield from _texts(item)
        case list():
            for item in value:
                yield from _texts(item)


def _num_characters(value: Any) -> int:
    return sum(map(len, _texts(value)))


def _load(tokenizer_json: str) -> Any:
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _longest_token(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Return the most characters that one token can stand for, or None when there is no such limit."""
    if not any(tokenizer.token_to_id(token) is not None for token in ("Ġ", "<0x0A>")):
        return None  # without byte tokens, one unknown token may stand for any text
    return max(map(len, tokenizer.get_vocab()))

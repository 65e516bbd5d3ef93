"""Log probabilities as clients get them: OpenAI's two forms, and vLLM's for prompts.

A logarithm that is minus infinity is written as -9999, which JSON can say.
"""

import codecs
from collections.abc import Sequence

import msgspec

from common.logprobs import TokenLogprobs
from gateway.text.token_texts import TokenTexts

LOWEST = -9999.0


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most likely tokens."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """One token of an answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """``logprobs`` of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """``logprobs`` of a completion choice, each list with one entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    """The most likely tokens, and the one that was chosen."""
    text_offset: list[int]
    """Characters of the text, an echoed prompt included, before the token."""


class PromptToken(msgspec.Struct, frozen=True):
    """A token that could stand at one place of the prompt."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""For each token of a prompt, by token id: the one that is there and the most likely ones. Null for the first."""


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], texts: TokenTexts
) -> ChatLogprobs | None:
    """Return what a chat choice says of ``token_ids``; None when there are none."""
    if not logprobs:
        return None
    return ChatLogprobs([_chat_token(*pair, texts) for pair in zip(token_ids, logprobs, strict=True)])


def _chat_token(token_id: int, known: TokenLogprobs, texts: TokenTexts) -> ChatTokenLogprob:
    top = [
        TopLogprob(texts.text(top_id), _finite(logprob), list(texts.data(top_id)))
        for top_id, logprob in zip(known.top_ids, known.top_logprobs, strict=True)
    ]
    return ChatTokenLogprob(texts.text(token_id), _finite(known.logprob), list(texts.data(token_id)), top)


class CompletionLogprobsWriter:
    """Writes the ``logprobs`` of one completion choice, piece by piece."""

    def __init__(self, texts: TokenTexts, num_top: int) -> None:
        self._texts = texts
        self._num_top = num_top
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """Return what the choice says of its next tokens; None stands for a token that nothing precedes."""
        return CompletionLogprobs(
            [self._texts.text(token_id) for token_id in token_ids],
            [None if known is None else _finite(known.logprob) for known in logprobs],
            [self._top(*pair) for pair in zip(token_ids, logprobs, strict=True)],
            [self._advance(token_id) for token_id in token_ids],
        )

    def _top(self, token_id: int, known: TokenLogprobs | None) -> dict[str, float] | None:
        if known is None:
            return None
        pairs = list(zip(known.top_ids, known.top_logprobs, strict=True))
        top = dict(pairs[: self._num_top]) | {token_id: known.logprob}
        return {self._texts.text(top_id): _finite(logprob) for top_id, logprob in top.items()}

    def _advance(self, token_id: int) -> int:
        """Return the characters before the token, and count its own."""
        offset = self._offset
        if not self._texts.is_silent(token_id):
            self._offset += len(self._decoder.decode(self._texts.data(token_id)))
        return offset


def prompt_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], texts: TokenTexts, num_top: int
) -> PromptLogprobs:
    """Return what is said of a prompt; ``logprobs`` are of its tokens from the second on."""
    return [None, *(_prompt_token(*pair, texts, num_top) for pair in zip(token_ids[1:], logprobs, strict=True))]


def _prompt_token(token_id: int, known: TokenLogprobs, texts: TokenTexts, num_top: int) -> dict[str, PromptToken]:
    ranked = list(enumerate(zip(known.top_ids, known.top_logprobs, strict=True), 1))[:num_top]
    found = {token_id: PromptToken(_finite(known.logprob), known.rank, texts.text(token_id))}
    found |= {top_id: PromptToken(_finite(logprob), rank, texts.text(top_id)) for rank, (top_id, logprob) in ranked}
    return {str(top_id): token for top_id, token in found.items()}


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)

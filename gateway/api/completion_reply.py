"""Replies of ``POST /v1/completions``: text, and the finish reason with the last of it."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from common.logprobs import TokenLogprobs
from common.sampling import FinishReason
from gateway.api.logprobs import CompletionLogprobs, CompletionLogprobsWriter, PromptLogprobs
from gateway.api.reply import ReplyHead, WholeAnswer
from gateway.api.usage import Usage
from gateway.request.generation import IndexedPiece

TokenIds = tuple[int, ...] | UnsetType


class Choice(msgspec.Struct, frozen=True):
    """One answer to one prompt, whole or a part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A reply, or one event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType = UNSET


class CompletionReply:
    """Writes one reply; remembers which choices have begun. ``echo`` has the texts of the prompts of all choices, if
    answers begin with them."""

    def __init__(self, head: ReplyHead, echo: Sequence[str] | None = None) -> None:
        self._head = head
        self._echo = echo
        self._begun: dict[int, CompletionLogprobsWriter] = {}

    def chunks(self, piece: IndexedPiece, usage: Usage | None) -> list[bytes]:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        index, part, with_ids = piece.index, piece.piece, self._head.return_token_ids
        echoes = self._echo is not None and index not in self._begun
        says_tokens = with_ids or self._head.num_logprobs is not None
        if not part.text and part.finish is None and not echoes and not (says_tokens and part.token_ids):
            return []
        is_first = index not in self._begun
        choice = Choice(
            index,
            self._text(index, part.text),
            self._logprobs(index, part.token_ids, part.logprobs, piece.prompt_logprobs),
            finish_reason=part.finish,
            stop_reason=UNSET if part.stop_reason is None else part.stop_reason,
            token_ids=part.token_ids if with_ids else UNSET,
            prompt_token_ids=self._head.prompts[index] if with_ids and is_first else UNSET,
        )
        return [self._completion([choice], usage)]

    def usage_chunk(self, usage: Usage) -> bytes:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        return self._completion([], usage)

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        with_ids = self._head.return_token_ids
        choices = [
            Choice(
                index,
                self._text(index, answer.text),
                self._logprobs(index, answer.token_ids, answer.logprobs, answer.prompt_logprobs),
                answer.finish,
                UNSET if answer.stop_reason is None else answer.stop_reason,
                answer.token_ids if with_ids else UNSET,
                self._head.prompts[index] if with_ids else UNSET,
                self._head.prompt_logprobs(index, answer),
            )
            for index, answer in enumerate(answers)
        ]
        return self._completion(choices, usage)

    def _text(self, index: int, text: str) -> str:
        """Return ``text``, behind the prompt where a choice begins with it; called before :meth:`_logprobs`."""
        return self._echo[index] + text if self._echo is not None and index not in self._begun else text

    def _logprobs(
        self,
        index: int,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        of_prompt: tuple[TokenLogprobs, ...] | None,
    ) -> CompletionLogprobs | None:
        head, is_first = self._head, index not in self._begun
        writer = self._begun.setdefault(index, CompletionLogprobsWriter(head.texts, head.num_logprobs or 0))
        if head.num_logprobs is None:
            return None
        if is_first and self._echo is not None and of_prompt is not None:
            return writer.write((*head.prompts[index], *token_ids), (None, *of_prompt, *logprobs))
        return writer.write(token_ids, logprobs)

    def _completion(self, choices: list[Choice], usage: Usage | None) -> bytes:
        head = self._head
        return msgspec.json.encode(
            Completion(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=UNSET if usage is None else usage,
            )
        )

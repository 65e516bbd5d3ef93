"""Replies of ``POST /v1/completions``: text, and the finish reason with the last of it."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from common.sampling import FinishReason
from gateway.api.reply import ReplyHead, WholeAnswer
from gateway.api.usage import Usage
from gateway.generation import IndexedPiece

TokenIds = tuple[int, ...] | UnsetType


class Choice(msgspec.Struct, frozen=True):
    """The answer to one prompt, whole or a part of it."""

    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: TokenIds = UNSET
    prompt_token_ids: TokenIds = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A reply, or one event of a stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType = UNSET


class CompletionReply:
    """Writes one reply; remembers which choices have begun."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._begun: set[int] = set()

    def chunks(self, piece: IndexedPiece, usage: Usage | None) -> list[bytes]:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        index, part, with_ids = piece.index, piece.piece, self._head.return_token_ids
        if not part.text and part.finish is None and not (with_ids and part.token_ids):
            return []
        is_first = index not in self._begun
        self._begun.add(index)
        choice = Choice(
            index,
            part.text,
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
                answer.text,
                None,
                answer.finish,
                UNSET if answer.stop_reason is None else answer.stop_reason,
                answer.token_ids if with_ids else UNSET,
                self._head.prompts[index] if with_ids else UNSET,
            )
            for index, answer in enumerate(answers)
        ]
        return self._completion(choices, usage)

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

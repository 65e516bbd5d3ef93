"""Replies of ``POST /v1/chat/completions``: first the role, then content, then one chunk with the finish reason."""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from common.sampling import FinishReason
from gateway.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs
from gateway.api.reply import ReplyHead, WholeAnswer
from gateway.api.usage import Usage
from gateway.generation import IndexedPiece

TokenIds = tuple[int, ...] | UnsetType


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: TokenIds = UNSET


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType = UNSET
    prompt_token_ids: TokenIds = UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    """The whole answer."""

    role: str
    content: str
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice of a reply that is not streamed."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | UnsetType = UNSET
    token_ids: TokenIds = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that is not streamed."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatReply:
    """Writes one reply; remembers which choices have begun."""

    def __init__(self, head: ReplyHead) -> None:
        self._head = head
        self._begun: set[int] = set()

    def chunks(self, piece: IndexedPiece, usage: Usage | None) -> list[bytes]:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        index, part, with_ids = piece.index, piece.piece, self._head.return_token_ids
        found: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            choice = ChunkChoice(index, Delta("assistant", ""))
            found.append(self._chunk([choice], usage, self._head.prompts[index] if with_ids else UNSET))
        logprobs = chat_logprobs(part.token_ids, part.logprobs, self._head.texts)
        if part.text or logprobs or (with_ids and part.token_ids):
            token_ids = part.token_ids if with_ids else UNSET
            choice = ChunkChoice(index, Delta(content=part.text), logprobs, token_ids=token_ids)
            found.append(self._chunk([choice], usage))
        if part.finish is not None:
            stop_reason = UNSET if part.stop_reason is None else part.stop_reason
            choice = ChunkChoice(index, Delta(), finish_reason=part.finish, stop_reason=stop_reason)
            found.append(self._chunk([choice], usage))
        return found

    def usage_chunk(self, usage: Usage) -> bytes:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        return self._chunk([], usage)

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        head, with_ids = self._head, self._head.return_token_ids
        choices = [
            Choice(
                index,
                AssistantMessage("assistant", answer.text),
                chat_logprobs(answer.token_ids, answer.logprobs, head.texts),
                answer.finish,
                UNSET if answer.stop_reason is None else answer.stop_reason,
                answer.token_ids if with_ids else UNSET,
            )
            for index, answer in enumerate(answers)
        ]
        return msgspec.json.encode(
            ChatCompletion(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=usage,
                prompt_token_ids=head.prompts[0] if with_ids else UNSET,
                prompt_logprobs=head.prompt_logprobs(0, answers[0]),
            )
        )

    def _chunk(self, choices: list[ChunkChoice], usage: Usage | None, prompt_token_ids: TokenIds = UNSET) -> bytes:
        head = self._head
        return msgspec.json.encode(
            Chunk(
                id=head.id,
                created=head.created,
                model=head.model,
                choices=choices,
                usage=UNSET if usage is None else usage,
                prompt_token_ids=prompt_token_ids,
            )
        )

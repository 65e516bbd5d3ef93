"""Replies of ``POST /v1/chat/completions``: first the role, then what the message says, then the finish reason."""

import enum
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from common.logprobs import TokenLogprobs
from common.sampling import FinishReason
from gateway.api.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs
from gateway.api.reply import ReplyHead, WholeAnswer
from gateway.api.usage import Usage
from gateway.request.generation import IndexedPiece
from gateway.text.message_stream import (
    ContentText,
    MessagePart,
    MessageStream,
    ReasoningText,
    ToolCallArguments,
    ToolCallStart,
)
from gateway.text.text_stream import Piece

TokenIds = tuple[int, ...] | UnsetType


class ChatFinish(enum.StrEnum):
    """Why a choice of a chat ended."""

    STOP = "stop"  # as FinishReason
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"  # it asks for calls of tools


class FunctionDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to a call: the name with the first one, then arguments."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(msgspec.Struct, frozen=True):
    """What a chunk adds to the calls; id and type come with the first one of a call."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[CallDelta, ...] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinish | None = None
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


class Function(msgspec.Struct, frozen=True):
    """What is called, with its arguments as JSON text."""

    name: str
    arguments: str


class Call(msgspec.Struct, frozen=True):
    """A call that the client is asked to make."""

    id: str
    type: str
    function: Function


class AssistantMessage(msgspec.Struct, frozen=True):
    """The whole answer."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: tuple[Call, ...] | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    """One choice of a reply that is not streamed."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinish | None
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
    """Writes one reply; remembers which choices have begun.

    ``make_stream`` makes the reader of a choice's text, None when the text is all content. ``is_named`` says that the
    client chose the tool, so that a call is no reason to finish.
    """

    def __init__(
        self, head: ReplyHead, make_stream: Callable[[], MessageStream] | None = None, *, is_named: bool = False
    ) -> None:
        self._head = head
        self._make_stream = make_stream
        self._is_named = is_named
        self._begun: set[int] = set()
        self._streams: dict[int, MessageStream] = {}

    def chunks(self, piece: IndexedPiece, usage: Usage | None) -> list[bytes]:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        index, part, with_ids = piece.index, piece.piece, self._head.return_token_ids
        found: list[bytes] = []
        if index not in self._begun:
            self._begun.add(index)
            choice = ChunkChoice(index, Delta("assistant", ""))
            found.append(self._chunk([choice], usage, self._head.prompts[index] if with_ids else UNSET))
        deltas, logprobs = self._deltas(index, part), self._logprobs(part.token_ids, part.logprobs)
        if not deltas and part.token_ids and (with_ids or logprobs):
            deltas = [Delta(content="")]
        token_ids = part.token_ids if with_ids else UNSET
        for delta in deltas:
            found.append(self._chunk([ChunkChoice(index, delta, logprobs, token_ids=token_ids)], usage))
            token_ids, logprobs = UNSET, None
        if part.finish is not None:
            stop_reason = UNSET if part.stop_reason is None else part.stop_reason
            finish = self._finish(part.finish, self._streams.get(index))
            choice = ChunkChoice(index, Delta(), finish_reason=finish, stop_reason=stop_reason)
            found.append(self._chunk([choice], usage))
        return found

    def _deltas(self, index: int, piece: Piece) -> list[Delta]:
        if self._make_stream is None:
            return [Delta(content=piece.text)] if piece.text else []
        if index not in self._streams:
            self._streams[index] = self._make_stream()
        stream = self._streams[index]
        parts = stream.feed(piece.text)
        if piece.finish is not None:
            parts += stream.flush()
        return [_delta(part) for part in parts]

    def _finish(self, finish: FinishReason, stream: MessageStream | None) -> ChatFinish:
        is_calls = finish is FinishReason.STOP and stream is not None and stream.num_calls > 0
        return ChatFinish.TOOL_CALLS if is_calls and not self._is_named else ChatFinish(finish.value)

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs | None:
        return None if self._head.num_logprobs is None else chat_logprobs(token_ids, logprobs, self._head.texts)

    def usage_chunk(self, usage: Usage) -> bytes:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        return self._chunk([], usage)

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        """See :class:`gateway.api.reply.ReplyWriter`."""
        head, with_ids = self._head, self._head.return_token_ids
        choices = [self._choice(index, answer, with_ids=with_ids) for index, answer in enumerate(answers)]
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

    def _choice(self, index: int, answer: WholeAnswer, *, with_ids: bool) -> Choice:
        stream = None if self._make_stream is None else self._make_stream()
        parts = [ContentText(answer.text)] if stream is None else stream.feed(answer.text) + stream.flush()
        return Choice(
            index,
            _message(parts),
            self._logprobs(answer.token_ids, answer.logprobs),
            None if answer.finish is None else self._finish(answer.finish, stream),
            UNSET if answer.stop_reason is None else answer.stop_reason,
            answer.token_ids if with_ids else UNSET,
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


def _delta(part: MessagePart) -> Delta:
    match part:
        case ContentText(text):
            return Delta(content=text)
        case ReasoningText(text):
            return Delta(reasoning_content=text)
        case ToolCallStart(index, call_id, name):
            return Delta(tool_calls=(CallDelta(index, FunctionDelta("", name), call_id, "function"),))
        case ToolCallArguments(index, text):
            return Delta(tool_calls=(CallDelta(index, FunctionDelta(text)),))


def _message(parts: Sequence[MessagePart]) -> AssistantMessage:
    """Return the message that ``parts`` make up; its content is null when it has calls and says nothing."""
    content = "".join([part.text for part in parts if isinstance(part, ContentText)])
    reasoning = "".join([part.text for part in parts if isinstance(part, ReasoningText)])
    starts = [part for part in parts if isinstance(part, ToolCallStart)]
    arguments = [""] * len(starts)
    for part in parts:
        if isinstance(part, ToolCallArguments):
            arguments[part.index] += part.text
    calls = tuple([Call(call.id, "function", Function(call.name, arguments[call.index])) for call in starts])
    return AssistantMessage(
        "assistant",
        None if calls and not content else content,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )

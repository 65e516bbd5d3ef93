"""The body of ``POST /v1/chat/completions``: its fields, and the conversation in it."""

import msgspec

from common.errors import InvalidRequest
from gateway.api import refused
from gateway.api.fields import MAX_LOGPROBS, CommonFields, check_common, check_range, decode
from gateway.chat_template import ChatMessage

MAX_MESSAGES = 10_000
ROLES = ("system", "developer", "user", "assistant")


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True):
    """One message as clients send it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    tool_call_id: str | None = None


class ChatFields(CommonFields, frozen=True, kw_only=True):
    """What is served of a chat completion request."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See :class:`gateway.api.fields.CommonFields`."""
        return (self.top_logprobs or 0) if self.logprobs else None


_DECODER = msgspec.json.Decoder(ChatFields)
_REFUSED = refused.RefusedFields(refused.CHAT)


def parse(body: bytes) -> ChatFields:
    """Return the fields of a chat completion request; raises InvalidRequest."""
    fields = decode(body, _DECODER)
    _REFUSED.check(body)
    check_common(fields)
    check_range("top_logprobs", fields.top_logprobs, 0, MAX_LOGPROBS)
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if not fields.messages:
        raise _wrong("must not be empty")
    if len(fields.messages) > MAX_MESSAGES:
        raise _wrong(f"has more than {MAX_MESSAGES} entries")
    return fields


def conversation(fields: ChatFields) -> list[ChatMessage]:
    """Return the messages as text; raises InvalidRequest for a role, a part or a tool call that is not served."""
    return [_as_text(n, message) for n, message in enumerate(fields.messages)]


def _as_text(n: int, message: Message) -> ChatMessage:
    if message.tool_calls or message.tool_call_id is not None or message.role in ("tool", "function"):
        raise _wrong("uses tools, which are not supported", n)
    if message.role not in ROLES:
        raise _wrong(f"has a role that is none of {', '.join(ROLES)}", n)
    return ChatMessage(message.role, _content(n, message), message.name)


def _content(n: int, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise _wrong("has no content", n)
    return "\n".join([_part(n, part) for part in message.content])


def _part(n: int, part: ContentPart) -> str:
    if part.type != "text":
        raise _wrong("has a content part that is not text; only text is supported", n)
    if part.text is None:
        raise _wrong("has a text part without text", n)
    return part.text


def _wrong(what: str, n: int | None = None) -> InvalidRequest:
    where = "messages" if n is None else f"messages[{n}]"
    return InvalidRequest(f"{where} {what}", param="messages")

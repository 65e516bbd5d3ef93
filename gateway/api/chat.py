"""The body of ``POST /v1/chat/completions``: its fields, and the conversation in it."""

import json
from typing import Any

import msgspec

from common.errors import InvalidRequest
from gateway.api import refused
from gateway.api.fields import MAX_LOGPROBS, CommonFields, check_common, check_range, decode
from gateway.api.tools import ToolChoice, ToolField
from gateway.bounds import Bounds, check_length
from gateway.text.chat_template import ChatMessage, ChatPrompt
from gateway.text.json_values import depth_exceeds
from gateway.tools.tool import ChoiceKind, ToolUse

ROLES = ("system", "developer", "user", "assistant", "tool")
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "baton_step"})
"""Variables of chat templates that ``chat_template_kwargs`` must not set."""


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """What was called, and with which arguments."""

    name: str
    arguments: str = "{}"


class CalledTool(msgspec.Struct, frozen=True):
    """A call that the assistant made earlier."""

    function: CalledFunction
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct, frozen=True):
    """One message as clients send it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatFields(CommonFields, frozen=True, kw_only=True):
    """What is served of a chat completion request."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolField] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """See :class:`gateway.api.fields.CommonFields`."""
        return (self.top_logprobs or 0) if self.logprobs else None


_DECODER = msgspec.json.Decoder(ChatFields)
_REFUSED = refused.RefusedFields(refused.CHAT)


def parse(body: bytes, bounds: Bounds) -> ChatFields:
    """Return the fields of a chat completion request; raises InvalidRequest."""
    fields = decode(body, _DECODER)
    _REFUSED.check(body)
    check_common(fields, bounds)
    check_range("top_logprobs", fields.top_logprobs, 0, MAX_LOGPROBS)
    if fields.top_logprobs and not fields.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return fields


def _check_variables(variables: dict[str, Any], bounds: Bounds) -> None:
    name = "chat_template_kwargs"
    if reserved := RESERVED.intersection(variables):
        raise InvalidRequest(f"{name} must not set {min(reserved)}", param=name)
    if depth_exceeds(variables, bounds.max_schema_depth):
        raise InvalidRequest(f"{name} is nested more than {bounds.max_schema_depth} deep", param=name)


def chat_prompt(messages: list[Message], use: ToolUse, variables: dict[str, Any] | None, bounds: Bounds) -> ChatPrompt:
    """Return what the template is given; raises InvalidRequest for what is not served.

    A model that must not call a tool is not told of any.
    """
    given = variables or {}
    _check_variables(given, bounds)
    tools = None if use.kind is ChoiceKind.NONE else [tool.as_dict() for tool in use.tools]
    return ChatPrompt([message.as_dict() for message in conversation(messages, bounds)], tools, given)


def conversation(messages: list[Message], bounds: Bounds) -> list[ChatMessage]:
    """Return the messages as text; raises InvalidRequest for a role, a part or a tool call that is not served."""
    if not messages:
        raise _wrong("must not be empty")
    check_length("messages", messages, bounds.max_messages)
    return [_as_text(n, message, bounds) for n, message in enumerate(messages)]


def _as_text(n: int, message: Message, bounds: Bounds) -> ChatMessage:
    if message.role not in ROLES:
        raise _wrong(f"has a role that is none of {', '.join(ROLES)}", n)
    if message.tool_calls and message.role != "assistant":
        raise _wrong("has tool_calls, which only an assistant has", n)
    check_length("messages", message.tool_calls, bounds.max_tools)
    return ChatMessage(
        message.role,
        _content(n, message),
        message.name,
        message.reasoning_content,
        tuple([_call(n, call, bounds) for call in message.tool_calls or ()]),
        message.tool_call_id,
    )


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


def _call(n: int, call: CalledTool, bounds: Bounds) -> dict[str, Any]:
    """Return a call as templates expect it, its arguments an object."""
    if call.type != "function":
        raise _wrong("has a tool call that is not of a function", n)
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict) or depth_exceeds(arguments, bounds.max_schema_depth):
        raise _wrong(f"has a tool call whose arguments are not a JSON object at most {bounds.max_schema_depth} deep", n)
    function = {"name": call.function.name, "arguments": arguments}
    found: dict[str, Any] = {"type": "function", "function": function}
    return found if call.id is None else {"id": call.id} | found


def _wrong(what: str, n: int | None = None) -> InvalidRequest:
    where = "messages" if n is None else f"messages[{n}]"
    return InvalidRequest(f"{where} {what}", param="messages")

"""A model's chat template: a conversation to the text of a prompt, in a jinja sandbox that changes nothing outside.

The template comes from the model's files (or, if the operator trusts those, from a request), the conversation from
clients. What a template raises about a conversation is the client's error. A template runs for a bounded number of
steps (turns of its loops and calls of its macros) and writes a bounded text. It runs on a thread.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequest
from gateway.text.json_values import map_strings

MAX_ECHO = 200
"""Characters of a template's own message that are told to a client."""

MAX_STEPS = 1_000_000
"""Turns of loops and calls of macros in one rendering; 10,000 messages take about as many."""

MAX_PROMPT_CHARACTERS = 64 * 1024 * 1024
MAX_PRODUCT = 1_000_000
"""How long a repetition in a template (``'x' * n``) may become."""

_STEP = "baton_step"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation, as text."""

    role: str
    content: str
    name: str | None = None
    reasoning: str | None = None
    """What the assistant thought."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """What the assistant called, as templates expect it."""
    tool_call_id: str | None = None
    """Which call a tool's message answers."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as templates expect it."""
        found: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            found["name"] = self.name
        if self.reasoning is not None:
            found["reasoning_content"] = self.reasoning
        if self.tool_calls:
            found["tool_calls"] = list(self.tool_calls)
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        return found


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """All that a template is given."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables that the client sets, such as ``enable_thinking``."""

    @classmethod
    def of(cls, messages: Sequence[ChatMessage]) -> "ChatPrompt":
        """Return a prompt of ``messages`` and nothing else."""
        return cls([message.as_dict() for message in messages])

    def map_text(self, change: Callable[[str], str]) -> "ChatPrompt":
        """Return it with every text changed that a client wrote."""
        tools = None if self.tools is None else map_strings(self.tools, change)
        variables = {name: map_strings(value, change) for name, value in self.variables.items()}
        return ChatPrompt([_map_message(message, change) for message in self.messages], tools, variables)


def _map_message(message: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    return {name: map_strings(value, change) for name, value in message.items()}


class ChatTemplate:
    """A compiled template; ``variables`` are the special tokens' texts by name. Raises ConfigError if it is wrong."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        self.source = source
        try:
            self._template = _Environment().compiled(source)
        except Exception as error:
            raise ConfigError(f"the chat template is not valid: {error}") from error
        self._variables = variables
        self._knows_developer = "developer" in source

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text that asks for the next message of the assistant; raises InvalidRequest."""
        try:
            return self._render(prompt)
        except _RefusedByTemplate as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {str(error)[:MAX_ECHO]}", param="messages"
            ) from error
        except Exception as error:
            raise InvalidRequest("the model's chat template cannot render these messages", param="messages") from error

    def _render(self, prompt: ChatPrompt) -> str:
        given = {
            "documents": None,
            "add_generation_prompt": True,
            **prompt.variables,
            **self._variables,
            "messages": [self._known_role(message) for message in prompt.messages],
            "tools": prompt.tools,
            _STEP: _Steps().count,
        }
        parts: list[str] = []
        num_characters = 0
        for part in self._template.generate(given):
            num_characters += len(part)
            if num_characters > MAX_PROMPT_CHARACTERS:
                raise _RefusedByTemplate(f"the prompt has more than {MAX_PROMPT_CHARACTERS} characters")
            parts.append(part)
        return "".join(parts)

    def _known_role(self, message: dict[str, Any]) -> dict[str, Any]:
        if message["role"] == "developer" and not self._knows_developer:
            return message | {"role": "system"}
        return message


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with what chat templates use and with limits."""

    intercepted_binops = frozenset(["*", "**"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def compiled(self, source: str) -> Any:
        """Return the template, made to count its steps."""
        tree = self.parse(source)
        bodies: Iterator[nodes.For | nodes.Macro | nodes.CallBlock]
        bodies = tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for node in list(bodies):
            step = nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(step).set_lineno(node.lineno, override=True))
        tree.set_environment(self)
        return self.from_string(tree)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute a product or a power, unless it would be very large."""
        if not (_is_small_product(left, right) if operator == "*" else _is_small_power(left, right)):
            raise _RefusedByTemplate(f"{operator} gives more than a template may make")
        return super().call_binop(context, operator, left, right)


def _is_small_product(left: Any, right: Any) -> bool:
    if isinstance(right, str | list | tuple):
        left, right = right, left
    if isinstance(left, str | list | tuple):
        return not isinstance(right, int) or len(left) * right <= MAX_PRODUCT
    return all(not isinstance(factor, int) or abs(factor) < 2**64 for factor in (left, right))


def _is_small_power(base: Any, exponent: Any) -> bool:
    return all(not isinstance(number, int) or abs(number) <= limit for number, limit in ((base, 10**6), (exponent, 64)))


class _Steps:
    """Counts the steps of one rendering."""

    def __init__(self) -> None:
        self._num_left = MAX_STEPS

    def count(self) -> None:
        self._num_left -= 1
        if self._num_left < 0:
            raise _RefusedByTemplate(f"it takes more than {MAX_STEPS} steps")


class _RefusedByTemplate(TemplateError):
    """The template called ``raise_exception``, or went over a limit."""


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja's interface

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedByTemplate(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is, where jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

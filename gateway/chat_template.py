"""A model's chat template: messages to the text of a prompt, in a jinja sandbox that changes nothing outside.

The template comes from the model's files, the messages from clients. What a template raises about its messages is the
client's error.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from common.errors import ConfigError, InvalidRequest

MAX_ECHO = 200
"""Characters of a template's own message that are told to a client."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation, as text."""

    role: str
    content: str
    name: str | None = None

    def map_text(self, change: Callable[[str], str]) -> "ChatMessage":
        """Return the message with every text of it changed."""
        return ChatMessage(change(self.role), change(self.content), None if self.name is None else change(self.name))


class ChatTemplate:
    """A compiled template; ``variables`` are the special tokens' texts by name. Raises ConfigError if it is wrong."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the model's chat template is not valid: {error}") from error
        self._variables = variables
        self._knows_developer = "developer" in source

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Return the prompt that asks for the next message of the assistant; raises InvalidRequest."""
        try:
            return self._template.render(
                **self._variables,
                messages=[self._as_dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except _RefusedByTemplate as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {str(error)[:MAX_ECHO]}", param="messages"
            ) from error
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise InvalidRequest("the model's chat template cannot render these messages", param="messages") from error

    def _as_dict(self, message: ChatMessage) -> dict[str, str]:
        role = "system" if message.role == "developer" and not self._knows_developer else message.role
        found = {"role": role, "content": message.content}
        return found if message.name is None else found | {"name": message.name}


class _RefusedByTemplate(TemplateError):
    """The template called ``raise_exception``."""


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

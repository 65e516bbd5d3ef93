"""Qwen3-Coder: calls as XML, any number of them, text around them.

    <tool_call>
    <function=weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The model leaves ``<tool_call>`` out at times, so ``<function=`` before the name of an offered tool begins a call too.
A string is passed on as it is written; a value of another type, when it is complete. A call that is cut off keeps its
JSON open, so that nobody runs half of a command.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.tools.json_scan import SPACE
from gateway.tools.marked_text import MarkedText, held_length
from gateway.tools.parts import CallArguments, CallStart, Content, Part
from gateway.tools.tool import Tool
from gateway.tools.xml_value import string_piece, takes_string, typed_value

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER = "<parameter="
FUNCTION_PARTS = (PARAMETER, FUNCTION_END, CLOSE)
VALUE_ENDS = ("\n</parameter>", "</parameter>", "\n</function>")
MARKERS = (OPEN, CLOSE, FUNCTION)


class _In(enum.Enum):
    """Where reading is."""

    TEXT = enum.auto()
    CALL = enum.auto()  # behind OPEN: a function must follow
    NAME = enum.auto()  # behind FUNCTION
    FUNCTION = enum.auto()  # between two parameters
    KEY = enum.auto()  # behind PARAMETER
    VALUE = enum.auto()


class XmlForm:
    """See :class:`gateway.tools.parts.ToolForm`."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas = {tool.name: _properties(tool) for tool in tools}
        self._text = MarkedText(MARKERS)
        self._in = _In.TEXT
        self._held = ""
        """Read, and nothing can be said of it yet."""
        self._raw = ""
        """What was read of a call that has no name yet."""
        self._properties: Mapping[str, Any] = {}
        self._num_parameters = 0
        self._is_string = False
        self._has_begun = False
        """The value's first character was read."""
        self._value = ""
        """Read of the value, and not passed on."""

    def feed(self, text: str) -> list[Part]:
        """Return what is certain after this further text."""
        parts: list[Part] = []
        rest: str | None = text
        while rest is not None and (rest or self._held):
            whole, self._held = self._held + rest, ""
            rest = self._read(whole, parts)
        return parts

    def flush(self) -> list[Part]:
        """Return the rest; the answer has ended."""
        if self._in is _In.TEXT:
            text = self._text.flush()
        elif self._in in (_In.CALL, _In.NAME):
            text = self._text.no_call(self._raw + self._held)
        else:
            text = ""
        return [Content(text)] if text else []

    def _read(self, text: str, parts: list[Part]) -> str | None:
        """Read on in ``text`` and return what follows what was read; None: more is needed."""
        match self._in:
            case _In.TEXT:
                return self._read_text(text, parts)
            case _In.CALL:
                return self._read_call(text, parts)
            case _In.NAME:
                return self._read_name(text, parts)
            case _In.FUNCTION:
                return self._read_function(text, parts)
            case _In.KEY:
                return self._read_key(text, parts)
            case _In.VALUE:
                return self._read_value(text, parts)

    def _read_text(self, text: str, parts: list[Part]) -> str | None:
        found = self._text.feed(text)
        if found.text:
            parts.append(Content(found.text))
        if found.marker == OPEN:
            self._in, self._raw = _In.CALL, OPEN
        elif found.marker == FUNCTION:
            self._in, self._raw = _In.NAME, FUNCTION
        return found.rest or None

    def _read_call(self, text: str, parts: list[Part]) -> str | None:
        rest = text.lstrip(SPACE)
        if rest.startswith(FUNCTION):
            self._in, self._raw = _In.NAME, self._raw + text[: len(text) - len(rest)] + FUNCTION
            return rest[len(FUNCTION) :]
        if FUNCTION.startswith(rest):
            self._held = text
            return None
        return self._no_call(text, parts)

    def _read_name(self, text: str, parts: list[Part]) -> str | None:
        name, mark, rest = text.partition(">")
        if not mark and "\n" not in text and "<" not in text:
            self._held = text
            return None
        is_call = bool(name) and bool(mark) and not set(name) & set("<\n")
        if not is_call or (name not in self._schemas and not self._raw.startswith(OPEN)):
            return self._no_call(text, parts)
        self._in, self._properties, self._num_parameters = _In.FUNCTION, self._schemas.get(name, {}), 0
        parts += [CallStart(name), CallArguments("{")]
        return rest

    def _no_call(self, text: str, parts: list[Part]) -> str:
        """What began as a call is text."""
        parts.append(Content(self._text.no_call(self._raw)))
        self._in, self._raw = _In.TEXT, ""
        return text

    def _read_function(self, text: str, parts: list[Part]) -> str | None:
        """Look for the next parameter or the end; what else the model writes there says nothing."""
        at, mark = _first(text, FUNCTION_PARTS)
        if at == len(text):
            self._held = text[len(text) - held_length(text, FUNCTION_PARTS) :]
            return None
        if mark == PARAMETER:
            self._in = _In.KEY
        else:
            parts.append(CallArguments("}"))
            self._text.call_ended()
            self._in = _In.TEXT
        return text[at + len(mark) :]

    def _read_key(self, text: str, parts: list[Part]) -> str | None:
        key, mark, rest = text.partition(">")
        if not mark:
            self._held = text
            return None
        comma = ", " if self._num_parameters else ""
        self._num_parameters += 1
        self._in, self._value, self._has_begun = _In.VALUE, "", False
        self._is_string = takes_string(self._properties.get(key))
        parts.append(CallArguments(f'{comma}"{string_piece(key)}": ' + ('"' if self._is_string else "")))
        return rest

    def _read_value(self, text: str, parts: list[Part]) -> str | None:
        at, mark = _first(text, VALUE_ENDS)
        is_complete = at < len(text)
        if not is_complete:
            at -= held_length(text, VALUE_ENDS)
            self._held = text[at:]
        self._value += text[:at]
        if self._is_string:
            parts += self._string_pieces()
        if not is_complete:
            return None
        parts.append(CallArguments('"' if self._is_string else typed_value(self._value)))
        self._in = _In.FUNCTION
        return text[at:] if mark == "\n</function>" else text[at + len(mark) :]

    def _string_pieces(self) -> list[Part]:
        text, self._value = self._value, ""
        if text and not self._has_begun:
            self._has_begun = True
            text = text.removeprefix("\n")
        return [CallArguments(string_piece(text))] if text else []


def _first(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return where the first of ``marks`` is in ``text``, and which; the length of the text when none is."""
    return min((len(text) if (at := text.find(mark)) < 0 else at, mark) for mark in marks)


def _properties(tool: Tool) -> Mapping[str, Any]:
    properties = (tool.parameters or {}).get("properties")
    return properties if isinstance(properties, dict) else {}

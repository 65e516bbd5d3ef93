"""One call as a JSON object, ``{"name": …, "arguments": {…}}``, read piece by piece.

The arguments' text is passed on as the model writes it, from the moment the name is known. Llama calls them
``parameters``. Arguments that come as a string, as some models write them, are that string's content.
"""

import enum
import json

from gateway.tools.json_scan import SPACE, JsonScanner
from gateway.tools.parts import CallArguments, CallStart, Part

ARGUMENTS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"


class _Expects(enum.Enum):
    """What the next character of the object should be."""

    OBJECT = enum.auto()  # the opening bracket
    KEY = enum.auto()  # a key, or the end of an empty object
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()  # a comma, or the end


class CallScanner:
    """Reads one call; ``known_names``, if given, are the only ones that make a call."""

    def __init__(self, known_names: frozenset[str] | None = None) -> None:
        self.is_done = False
        self.is_wrong = False
        """It is no call; if :attr:`is_named` it was taken for one so far."""
        self.is_named = False
        self.raw = ""
        """What was read up to the name, for the case that it is no call."""
        self._known_names = known_names
        self._expects = _Expects.OBJECT
        self._scanner: JsonScanner | None = None
        self._value = ""
        self._key: str | None = None
        self._name: str | None = None
        self._arguments = ""
        self._has_arguments = False
        self._parts: list[Part] = []

    def feed(self, text: str, start: int) -> int:
        """Read ``text`` from ``start``; return where reading stopped: at the call's end, at what is wrong, or later."""
        at = start
        while at < len(text) and not (self.is_done or self.is_wrong):
            at = self._read_value(text, at) if self._scanner is not None else self._read_mark(text, at)
        if not self.is_named:
            self.raw += text[start:at]
        return at

    def take(self) -> list[Part]:
        """Return what is certain and was not taken yet."""
        if self.is_named and self._arguments:
            self._parts.append(CallArguments(self._arguments))
            self._arguments = ""
        parts, self._parts = self._parts, []
        return parts

    def _read_mark(self, text: str, at: int) -> int:
        character = text[at]
        if character in SPACE:
            return at + 1
        match self._expects, character:
            case _Expects.OBJECT, "{":
                self._expects = _Expects.KEY
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.COMMA, ",":
                self._expects = _Expects.KEY
            case ((_Expects.COMMA | _Expects.KEY), "}"):
                self._end()
            case (_Expects.KEY, '"') | (_Expects.VALUE, _):
                self._scanner, self._value = JsonScanner(), ""
                return at
            case _:
                self.is_wrong = True
                return at
        return at + 1

    def _read_value(self, text: str, at: int) -> int:
        assert self._scanner is not None
        end = self._scanner.feed(text, at)
        if self._key in ARGUMENTS and (self._value or text[at]).startswith("{"):
            self._value, self._has_arguments = "{", True
            self._arguments += text[at:end]
        else:
            self._value += text[at:end]
        if self._scanner.is_done:
            self._scanner = None
            self._value_ended()
        return end

    def _value_ended(self) -> None:
        if self._expects is _Expects.KEY:
            self._key = _decoded(self._value)
            self._expects = _Expects.COLON
            self.is_wrong = self._key is None
            return
        if self._key == "name":
            self._named(_decoded(self._value))
        elif self._key in ARGUMENTS and not self._value.startswith("{"):
            self._arguments = _decoded(self._value) or NO_ARGUMENTS
            self._has_arguments = True
        self._key = None
        self._expects = _Expects.COMMA

    def _named(self, name: str | None) -> None:
        is_known = bool(name) and (self._known_names is None or name in self._known_names)
        if self._name is not None or name is None or not is_known:
            self.is_wrong = True
            return
        self._name, self.is_named = name, True
        self._parts.append(CallStart(name))

    def _end(self) -> None:
        self.is_wrong = not self.is_named
        self.is_done = self.is_named
        if not self._has_arguments:
            self._arguments = NO_ARGUMENTS


def _decoded(value: str) -> str | None:
    """Return the string that JSON text stands for, or None when it stands for something else."""
    try:
        found = json.loads(value)
    except ValueError:
        return None
    return found if isinstance(found, str) else None

"""A JSON array of calls, as Mistral writes it after its marker and a grammar writes it when a call is demanded."""

from gateway.tools.call_scanner import CallScanner
from gateway.tools.json_scan import SPACE
from gateway.tools.parts import Part


class CallList:
    """Reads one array. Owned by a form, which asks for :attr:`left` when reading is done or the answer has ended."""

    def __init__(self) -> None:
        self.is_done = False
        """The array has ended, or goes on with something that is no call."""
        self._has_begun = False
        self._has_calls = False
        self._call: CallScanner | None = None
        self._raw = ""

    @property
    def left(self) -> str:
        """What was read and turned out to be no call."""
        return self._raw + ("" if self._call is None or self._call.is_named else self._call.raw)

    def feed(self, text: str, start: int, parts: list[Part]) -> int:
        """Read ``text`` from ``start`` and add what it says to ``parts``; return where reading stopped."""
        at = start
        while at < len(text) and not self.is_done:
            at = self._read_call(self._call, text, at, parts) if self._call is not None else self._read_mark(text, at)
        return at

    def _read_mark(self, text: str, at: int) -> int:
        character = text[at]
        if character == "{" and self._has_begun:
            self._call = CallScanner()
            return at
        if character == "[" and not self._has_begun:
            self._has_begun = True
        elif character == "]" and self._has_begun:
            self.is_done = True
        elif character not in SPACE and not (character == "," and self._has_begun):
            self.is_done = True
            return at
        if not self._has_calls:
            self._raw += character
        return at + 1

    def _read_call(self, call: CallScanner, text: str, at: int, parts: list[Part]) -> int:
        end = call.feed(text, at)
        parts += call.take()
        if call.is_named:
            self._has_calls, self._raw = True, ""
        self.is_done = call.is_wrong
        if call.is_done:
            self._call = None
        return end

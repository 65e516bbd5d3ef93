"""Hermes and Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them, text around them."""

from gateway.tools.call_scanner import CallScanner
from gateway.tools.marked_text import MarkedText
from gateway.tools.parts import Content, Part

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MARKERS = (OPEN, CLOSE)


class HermesForm:
    """See :class:`gateway.tools.parts.ToolForm`. A closing marker that is missing or too many is no matter."""

    def __init__(self) -> None:
        self._text = MarkedText(MARKERS)
        self._call: CallScanner | None = None

    def feed(self, text: str) -> list[Part]:
        """Return what is certain after this further text."""
        parts: list[Part] = []
        while text:
            text = self._read_call(self._call, text, parts) if self._call is not None else self._read_text(text, parts)
        return parts

    def flush(self) -> list[Part]:
        """Return the rest; the answer has ended."""
        if self._call is not None:
            return [] if self._call.is_named else [Content(self._text.no_call(OPEN + self._call.raw))]
        text = self._text.flush()
        return [Content(text)] if text else []

    def _read_text(self, text: str, parts: list[Part]) -> str:
        found = self._text.feed(text)
        if found.text:
            parts.append(Content(found.text))
        if found.marker == OPEN:
            self._call = CallScanner()
        return found.rest

    def _read_call(self, call: CallScanner, text: str, parts: list[Part]) -> str:
        end = call.feed(text, 0)
        parts += call.take()
        if call.is_wrong and not call.is_named:
            parts.append(Content(self._text.no_call(OPEN + call.raw)))
            self._call = None
        elif call.is_done or call.is_wrong:
            self._text.call_ended()
            self._call = None
        return text[end:]

"""Llama 3: the whole answer is ``{"name": …, "parameters": {…}}``, maybe after ``<|python_tag|>``, maybe several with
``;`` between. Nothing else marks a call, so an object is one only if it names a tool that the client offered."""

from gateway.tools.call_scanner import CallScanner
from gateway.tools.json_scan import SPACE
from gateway.tools.parts import Content, Part

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = SPACE + ";,"


class Llama3Form:
    """See :class:`gateway.tools.parts.ToolForm`."""

    def __init__(self, tool_names: frozenset[str]) -> None:
        self._tool_names = tool_names
        self._before = ""
        """Read before the next call, and not known to be text yet."""
        self._call: CallScanner | None = None
        self._has_calls = False
        self._is_text = False

    def feed(self, text: str) -> list[Part]:
        """Return what is certain after this further text."""
        parts: list[Part] = []
        while text and not self._is_text:
            if self._call is not None:
                text = self._read_call(self._call, text, parts)
            else:
                text = self._read_before(self._before + text)
        if text:
            parts.append(Content(text))
        return parts

    def flush(self) -> list[Part]:
        """Return the rest; the answer has ended."""
        left = self._before
        if self._call is not None and not self._call.is_named:
            left += self._call.raw
        self._before = ""
        return [Content(left)] if left and not (self._has_calls and not left.strip(_BETWEEN)) else []

    def _read_before(self, text: str) -> str:
        rest = text.lstrip(_BETWEEN if self._has_calls else SPACE)
        if not self._has_calls:
            rest = rest.removeprefix(PYTHON_TAG).lstrip(SPACE)
        if rest.startswith("{"):
            self._before, self._call = text[: len(text) - len(rest)], CallScanner(self._tool_names)
            return rest
        if not rest or (not self._has_calls and PYTHON_TAG.startswith(rest)):
            self._before = text
            return ""
        self._before, self._is_text = "", True
        return rest if self._has_calls else text

    def _read_call(self, call: CallScanner, text: str, parts: list[Part]) -> str:
        end = call.feed(text, 0)
        if call.is_wrong and not call.is_named:
            parts.append(Content(self._before + call.raw))
            self._before, self._call, self._is_text = "", None, True
            return text[end:]
        parts += call.take()
        if call.is_named:
            self._has_calls, self._before = True, ""
        if call.is_done or call.is_wrong:
            self._call = None
        return text[end:]

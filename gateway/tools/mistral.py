"""Mistral: ``[TOOL_CALLS]`` and then ``[{"name": …, "arguments": {…}}, …]``, or, in newer models, for each call
``[TOOL_CALLS]name[ARGS]{…}`` (between name and arguments there may be a ``[CALL_ID]``, or nothing)."""

from gateway.tools.call_list import CallList
from gateway.tools.json_scan import SPACE, JsonScanner
from gateway.tools.marked_text import MarkedText
from gateway.tools.parts import CallArguments, CallStart, Content, Part

MARKER, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MARKERS = (MARKER,)
MAX_NAME_LENGTH = 256


class MistralForm:
    """See :class:`gateway.tools.parts.ToolForm`."""

    def __init__(self) -> None:
        self._text = MarkedText(MARKERS)
        self._head: str | None = None
        """What follows a marker, until it is clear which of the two ways of writing it begins."""
        self._list: CallList | None = None
        self._arguments: JsonScanner | None = None

    def feed(self, text: str) -> list[Part]:
        """Return what is certain after this further text."""
        parts: list[Part] = []
        while text:
            if self._arguments is not None:
                text = self._read_arguments(self._arguments, text, parts)
            elif self._list is not None:
                text = self._read_list(self._list, text, parts)
            elif self._head is not None:
                text = self._read_head(self._head + text, parts)
            else:
                text = self._read_text(text, parts)
        return parts

    def flush(self) -> list[Part]:
        """Return the rest; the answer has ended."""
        if self._arguments is not None:
            return []
        if self._list is not None:
            left = self._list.left
            return [Content(self._text.no_call(MARKER + left))] if left else []
        text = self._text.flush() if self._head is None else self._text.no_call(MARKER + self._head)
        return [Content(text)] if text else []

    def _read_text(self, text: str, parts: list[Part]) -> str:
        found = self._text.feed(text)
        if found.text:
            parts.append(Content(found.text))
        if found.marker is not None:
            self._head = ""
        return found.rest

    def _read_head(self, head: str, parts: list[Part]) -> str:
        """Read a name up to its arguments, or find the beginning of a list."""
        start = head.lstrip(SPACE)
        if not start:
            self._head = head
            return ""
        if start.startswith("["):
            self._head, self._list = None, CallList()
            return start
        at = start.find("{")
        before = start if at < 0 else start[:at]
        is_name = len(before) <= MAX_NAME_LENGTH and "\n" not in before
        if is_name and at < 0:
            self._head = head
            return ""
        self._head = None
        name = before.partition("[")[0].strip(SPACE)
        if not is_name or not name or " " in name:
            parts.append(Content(self._text.no_call(MARKER)))
            return head
        self._arguments = JsonScanner()
        parts.append(CallStart(name))
        return start[at:]

    def _read_list(self, calls: CallList, text: str, parts: list[Part]) -> str:
        end = calls.feed(text, 0, parts)
        if calls.is_done:
            if "".join(calls.left.split()) in ("", "[]"):
                self._text.call_ended()
            else:
                parts.append(Content(self._text.no_call(MARKER + calls.left)))
            self._list = None
        return text[end:]

    def _read_arguments(self, scanner: JsonScanner, text: str, parts: list[Part]) -> str:
        end = scanner.feed(text, 0)
        parts.append(CallArguments(text[:end]))
        if scanner.is_done:
            self._text.call_ended()
            self._arguments = None
        return text[end:]

"""Answers to ``tool_choice`` "required" or a name: a grammar made them JSON, so nothing marks the calls."""

from gateway.tools.call_list import CallList
from gateway.tools.parts import CallArguments, CallStart, Content, Part


class RequiredForm:
    """The answer is an array of calls. See :class:`gateway.tools.parts.ToolForm`."""

    def __init__(self) -> None:
        self._list = CallList()

    def feed(self, text: str) -> list[Part]:
        """Return what is certain after this further text."""
        parts: list[Part] = []
        self._list.feed(text, 0, parts)
        return parts

    def flush(self) -> list[Part]:
        """Return the rest; the answer has ended."""
        left = self._list.left
        return [Content(left)] if left else []


class NamedForm:
    """The answer is the arguments of the one tool that the client chose."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Part]:
        """Return what is certain after this further text."""
        if not text:
            return []
        start = [] if self._has_begun else [CallStart(self._name)]
        self._has_begun = True
        return [*start, CallArguments(text)]

    def flush(self) -> list[Part]:
        """Return the rest; the answer has ended."""
        return []

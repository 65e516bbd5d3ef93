"""One chat answer's text to the parts of an assistant's message: reasoning, content, and calls of tools with their ids.

The parts joined are the same however the text is cut, so a streamed answer and a whole one are read by the same code.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.text.thinking import ThinkReader, Thought
from gateway.tools.parts import CallArguments, CallStart, Content, Part, ToolForm


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of what it says."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of a call's arguments, as JSON text."""

    index: int
    text: str


MessagePart = ReasoningText | ContentText | ToolCallStart | ToolCallArguments


class MessageStream:
    """Reads one answer. ``think`` and ``form`` are None for an answer without reasoning or without tools."""

    def __init__(
        self,
        think: ThinkReader | None,
        form: ToolForm | None,
        new_id: Callable[[], str],
        *,
        parallel: bool = True,
    ) -> None:
        self.num_calls = 0
        """Calls so far."""
        self._think = think
        self._form = form
        self._new_id = new_id
        self._parallel = parallel
        self._num_found = 0

    def feed(self, text: str) -> list[MessagePart]:
        """Return the parts that are certain after this further text."""
        return self._sorted(Thought(content=text) if self._think is None else self._think.feed(text))

    def flush(self) -> list[MessagePart]:
        """Return the rest; the answer has ended."""
        parts = [] if self._think is None else self._sorted(self._think.flush())
        return parts if self._form is None else parts + self._numbered(self._form.flush())

    def _sorted(self, thought: Thought) -> list[MessagePart]:
        parts: list[MessagePart] = [ReasoningText(thought.reasoning)] if thought.reasoning else []
        if self._form is not None:
            return parts + self._numbered(self._form.feed(thought.content))
        return [*parts, ContentText(thought.content)] if thought.content else parts

    def _numbered(self, parts: Sequence[Part]) -> list[MessagePart]:
        found: list[MessagePart] = []
        for part in parts:
            match part:
                case Content(text):
                    found.append(ContentText(text))
                case CallStart(name):
                    self._num_found += 1
                    if self._takes_calls():
                        self.num_calls = self._num_found
                        found.append(ToolCallStart(self.num_calls - 1, self._new_id(), name))
                case CallArguments(text):
                    if self._takes_calls():
                        found.append(ToolCallArguments(self.num_calls - 1, text))
        return found

    def _takes_calls(self) -> bool:
        return self._parallel or self._num_found == 1

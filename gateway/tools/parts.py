"""What an assistant's message is made of, and what a tool form must do."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A further call of a tool begins."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the last call's arguments."""

    text: str


Part = Content | CallStart | CallArguments


class ToolForm(Protocol):
    """Finds the calls in one answer, however its text is cut. Text that is no call after all comes out as content."""

    def feed(self, text: str) -> list[Part]:
        """Return what is certain after this further text."""

    def flush(self) -> list[Part]:
        """Return the rest; the answer has ended."""

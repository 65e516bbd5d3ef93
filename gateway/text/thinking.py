"""Models that think before they answer: ``<think>…</think>`` at the beginning of an answer is reasoning, not content.

A chat template may write the opening mark itself, as the end of the prompt; the answer then begins inside. White space
next to the marks belongs to neither side.
"""

from dataclasses import dataclass

from gateway.tools.marked_text import held_length

OPEN, CLOSE = "<think>", "</think>"
MARKS = (OPEN, CLOSE)


@dataclass(frozen=True, slots=True)
class Thought:
    """A further part of an answer, sorted."""

    reasoning: str = ""
    content: str = ""


class ThinkReader:
    """Sorts one answer, however its text is cut."""

    def __init__(self, *, begins_inside: bool) -> None:
        self._is_inside = begins_inside
        self._is_past = False
        """The reasoning has ended, or there is none."""
        self._has_text = False
        """The side that is written now has begun."""
        self._held = ""

    def feed(self, text: str) -> Thought:
        """Return what is certain after this further text."""
        if self._is_past:
            return Thought(content=self._content(text))
        whole, self._held = self._held + text, ""
        if not self._is_inside:
            begun = whole.lstrip()
            if begun.startswith(OPEN):
                self._is_inside, whole = True, begun[len(OPEN) :]
            elif OPEN.startswith(begun):
                self._held = whole
                return Thought()
            else:
                self._is_past = self._has_text = True
                return Thought(content=whole)
        return self._reasoning(whole)

    def flush(self) -> Thought:
        """Return what is held; the answer has ended."""
        held, self._held = self._held, ""
        if not self._is_inside:
            return Thought(content=held)
        return Thought(reasoning=held.rstrip())

    def _reasoning(self, whole: str) -> Thought:
        text, mark, rest = whole.partition(CLOSE)
        if not self._has_text:
            text = text.lstrip()
        if mark:
            self._is_inside, self._is_past, self._has_text = False, True, False
            return Thought(text.rstrip(), self._content(rest))
        kept = text[: len(text) - held_length(text, (CLOSE,))].rstrip()
        self._held = text[len(kept) :]
        self._has_text = self._has_text or bool(kept)
        return Thought(kept)

    def _content(self, text: str) -> str:
        if not self._has_text:
            text = text.lstrip()
            self._has_text = bool(text)
        return text

"""Stop strings, matched over token borders.

Text that may be the beginning of a stop string is held back, so nothing of one ever reaches the client; it is let go
when it turns out to be something else, or once at the end. Of two that end at the same character the longer one wins.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    """What became of some text."""

    text: str
    """May be sent: it can no longer be a part of a stop string."""
    matched: str | None = None
    """The stop string that ended the answer; what follows it is dropped."""


class StopMatcher:
    """Holds the tail of one answer. ``stop_strings`` are not empty."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        ordered = sorted(set(stop_strings), key=len, reverse=True)
        self._patterns = [_Pattern(stop) for stop in ordered]
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, if one was."""
        return self._matched

    def feed(self, text: str) -> StopResult:
        """Take the next piece of the answer and return what may be sent of it and of what was held."""
        if self._matched is not None:
            return StopResult("", self._matched)
        found = min(
            ((end, rank) for rank, pattern in enumerate(self._patterns) if (end := pattern.advance(text)) >= 0),
            default=None,
        )
        whole = self._held + text
        if found is not None:
            end, rank = found
            self._matched = self._patterns[rank].stop
            self._held = ""
            return StopResult(whole[: len(whole) - len(text) + end - len(self._matched)], self._matched)
        keep = max((pattern.state for pattern in self._patterns), default=0)
        cut = len(whole) - keep
        self._held = whole[cut:]
        return StopResult(whole[:cut])

    def flush(self) -> str:
        """Return what is held; the answer has ended without a stop string."""
        text, self._held = self._held, ""
        return text


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton; ``state`` characters of it are matched at the text's end."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._fallback = _fallbacks(stop)

    def advance(self, text: str) -> int:
        """Read ``text``; return how much of it was read when the whole string was seen, or -1."""
        stop, state, at = self.stop, self.state, 0
        while at < len(text):
            if state == 0:
                at = text.find(stop[0], at)
                if at < 0:
                    break
            while state and text[at] != stop[state]:
                state = self._fallback[state]
            if text[at] == stop[state]:
                state += 1
            at += 1
            if state == len(stop):
                return at
        self.state = state
        return -1


def _fallbacks(stop: str) -> list[int]:
    """Return for each number of matched characters how many stay matched when the next one differs."""
    fallback = [0] * len(stop)
    state = 0
    for at in range(1, len(stop)):
        fallback[at] = state
        while state and stop[at] != stop[state]:
            state = fallback[state]
        state += stop[at] == stop[state]
    return fallback

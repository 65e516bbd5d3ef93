"""Text with markers in it, cut anywhere: what is before a marker, and which one it is.

White space beside a call is the form's and not the message's: it is held until text or a call follows. Before a marker
that begins no call after all, it is the message's again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.tools.json_scan import SPACE


@dataclass(frozen=True, slots=True)
class Found:
    """What was read up to a marker or the end of the text so far."""

    text: str
    """May be sent."""
    marker: str | None = None
    rest: str = ""
    """What follows the marker, not read yet."""


class MarkedText:
    """Looks for ``markers``, none of which is a part of another. Owned by one form."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(markers)
        self._held = ""
        self._space = ""
        self._dropped = ""
        """White space before the last marker."""
        self._after_call = False

    def feed(self, text: str) -> Found:
        """Read ``text``; stops after the first marker."""
        whole = self._held + text
        at, marker = min(
            ((at, marker) for marker in self._markers if (at := whole.find(marker)) >= 0), default=(-1, None)
        )
        if marker is not None:
            self._held = ""
            before = self._without_space(whole[:at])
            self._dropped, self._space = self._space, ""
            return Found(before, marker, whole[at + len(marker) :])
        cut = len(whole) - held_length(whole, self._markers)
        self._held = whole[cut:]
        return Found(self._without_space(whole[:cut]))

    def call_ended(self) -> None:
        """A call was just read: white space that follows is dropped."""
        self._after_call = True

    def no_call(self, text: str) -> str:
        """Return ``text``, the last marker and what was read behind it, as text: there was no call."""
        space, self._dropped = "" if self._after_call else self._dropped, ""
        self._after_call = False
        return space + text

    def flush(self) -> str:
        """Return what is held; no marker comes any more."""
        text = self._without_space(self._held)
        space, self._held, self._space = self._space, "", ""
        return text + ("" if self._after_call else space)

    def _without_space(self, text: str) -> str:
        """Return what can be said of ``text`` now, without white space that a marker may follow."""
        if self._after_call:
            text = text.lstrip(SPACE)
        kept = (self._space + text).rstrip(SPACE)
        self._space = (self._space + text)[len(kept) :]
        if kept:
            self._after_call = False
        return kept


def held_length(text: str, markers: Sequence[str]) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of one of ``markers``."""
    longest = max((len(marker) for marker in markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        tail = text[-length:]
        if any(marker.startswith(tail) for marker in markers):
            return length
    return 0

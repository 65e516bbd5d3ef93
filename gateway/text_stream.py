"""One answer's tokens to the text that may be sent: detokenised, cut at a stop string, complete at the end."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from common.sampling import FinishReason
from gateway.detokenizer import Detokenizer
from gateway.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """A further part of one answer."""

    text: str
    token_ids: tuple[int, ...]
    """Tokens that arrived with it. Their text may come with a later piece."""
    finish: FinishReason | None = None
    """Set on the last piece."""
    stop_reason: str | None = None
    """The stop string that ended the answer."""


class TextStream:
    """Turns the tokens of one answer into pieces. ``eos_token_ids`` have no text where they end the answer."""

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str], eos_token_ids: Collection[int]) -> None:
        self._detokenizer = detokenizer
        self._stop = StopMatcher(stop_strings) if stop_strings else None
        self._eos_token_ids = eos_token_ids

    def feed(self, token_ids: tuple[int, ...], finish: FinishReason | None) -> Piece:
        """Return what may be sent after ``token_ids``, the last of which ends the answer if ``finish`` is set.

        The piece finishes, with fewer tokens, when a stop string is found earlier.
        """
        ends_by_token = finish is FinishReason.STOP and token_ids and token_ids[-1] in self._eos_token_ids
        written = token_ids[:-1] if ends_by_token else token_ids
        if self._stop is None:
            text = self._detokenizer.feed(written)
            return Piece(text + self._detokenizer.flush() if finish else text, token_ids, finish)
        return self._feed_until_stop(self._stop, token_ids, written, finish)

    def _feed_until_stop(
        self, stop: StopMatcher, token_ids: tuple[int, ...], written: tuple[int, ...], finish: FinishReason | None
    ) -> Piece:
        text = ""
        for n, token_id in enumerate(written, 1):
            found = stop.feed(self._detokenizer.feed((token_id,)))
            text += found.text
            if found.matched is not None:
                return Piece(text, token_ids[:n], FinishReason.STOP, found.matched)
        if finish is None:
            return Piece(text, token_ids)
        found = stop.feed(self._detokenizer.flush())
        if found.matched is not None:
            return Piece(text + found.text, token_ids, FinishReason.STOP, found.matched)
        return Piece(text + found.text + stop.flush(), token_ids, finish)

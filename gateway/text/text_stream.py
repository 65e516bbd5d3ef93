"""One answer's tokens to the text that may be sent: detokenised, cut at a stop string, complete at the end."""

from collections.abc import Sequence
from dataclasses import dataclass

from common.logprobs import TokenLogprobs
from common.sampling import FinishReason, SamplingParams
from gateway.text.detokenizer import Detokenizer
from gateway.text.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Piece:
    """A further part of one answer."""

    text: str
    token_ids: tuple[int, ...]
    """Tokens that arrived with it. Their text may come with a later piece."""
    finish: FinishReason | None = None
    """Set on the last piece."""
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the answer."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``token_ids``, if that was asked for."""


class TextStream:
    """Turns the tokens of one answer into pieces.

    A token that ends the answer has no text, nor has a stop string, unless ``includes_stop`` asks for it. Stop strings
    are looked for in what comes after ``min_tokens`` tokens.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stop_strings: Sequence[str],
        sampling: SamplingParams,
        *,
        includes_stop: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stop = StopMatcher(stop_strings) if stop_strings else None
        self._sampling = sampling
        self._includes_stop = includes_stop
        self._num_unmatched = sampling.min_tokens

    def feed(self, token_ids: tuple[int, ...], finish: FinishReason | None) -> Piece:
        """Return what may be sent after ``token_ids``, the last of which ends the answer if ``finish`` is set.

        The piece finishes, with fewer tokens, when a stop string is found earlier.
        """
        stop_token = self._stop_token(token_ids, finish)
        written = token_ids[:-1] if self._ends_silently(token_ids, finish, stop_token) else token_ids
        if self._stop is None:
            text = self._detokenizer.feed(written)
            return Piece(text + self._detokenizer.flush() if finish else text, token_ids, finish, stop_token)
        return self._feed_until_stop(self._stop, token_ids, written, finish, stop_token)

    def _stop_token(self, token_ids: tuple[int, ...], finish: FinishReason | None) -> int | None:
        """Return the token that ends the answer, if it is one that the client named."""
        if finish is not FinishReason.STOP or not token_ids or token_ids[-1] in self._sampling.eos_token_ids:
            return None
        return token_ids[-1] if token_ids[-1] in self._sampling.stop_token_ids else None

    def _ends_silently(self, token_ids: tuple[int, ...], finish: FinishReason | None, stop_token: int | None) -> bool:
        """Whether the last token only ends the answer; one that completes its structure is part of it."""
        if finish is not FinishReason.STOP or not token_ids:
            return False
        if stop_token is not None:
            return not self._includes_stop
        return token_ids[-1] in self._sampling.eos_token_ids

    def _feed_until_stop(
        self,
        stop: StopMatcher,
        token_ids: tuple[int, ...],
        written: tuple[int, ...],
        finish: FinishReason | None,
        stop_token: int | None,
    ) -> Piece:
        text = self._detokenizer.feed(written[: self._num_unmatched])
        num_passed = min(self._num_unmatched, len(written))
        self._num_unmatched -= num_passed
        for n, token_id in enumerate(written[num_passed:], num_passed + 1):
            found = stop.feed(self._detokenizer.feed((token_id,)))
            text += found.text
            if found.matched is not None:
                return Piece(self._with_stop(text, found.matched), token_ids[:n], FinishReason.STOP, found.matched)
        if finish is None:
            return Piece(text, token_ids)
        found = stop.feed(self._detokenizer.flush())
        if found.matched is not None:
            text = self._with_stop(text + found.text, found.matched)
            return Piece(text, token_ids, FinishReason.STOP, found.matched)
        return Piece(text + found.text + stop.flush(), token_ids, finish, stop_token)

    def _with_stop(self, text: str, stop: str) -> str:
        return text + stop if self._includes_stop else text


class NoText:
    """Stands in for the stream of an answer of which nothing is wanted: only its prompt is."""

    def feed(self, token_ids: tuple[int, ...], finish: FinishReason | None) -> Piece:
        """Return the end of the answer."""
        return Piece("", (), FinishReason.LENGTH)

"""Beam search: which continuations of which beams live on, and when the best answers are known.

As transformers does it, so that the answers are the same. A step looks at the K likeliest continuations of all beams
together, K being ``width * (1 + number of ends)`` and at least twice the width. Those among the first ``width`` that
end the answer are complete; their score is the sum of their log probabilities over ``length ** length_penalty``, and
the ``width`` best are kept. The likeliest ``width`` of the others live on. It is over when all have ``max_tokens``,
when ``early_stopping`` is True and ``width`` are complete, or when no beam that lives can beat the worst that was kept:
by its length now (``early_stopping`` False), or by the longest there can be where that is favoured ("never").

Pure: knows scores and tokens, no sequences and no blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from common.logprobs import TokenLogprobs
from common.sampling import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Continuation:
    """One token more for one of the beams."""

    parent: int
    """Number of the beam."""
    token_id: int
    score: float
    """Sum of the log probabilities of all output tokens."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A complete answer."""

    output_ids: tuple[int, ...]
    score: float
    """By which complete answers are compared."""
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class _Beam:
    output_ids: tuple[int, ...]
    score: float


class BeamSearch:
    """The search of one request, whose parameters ask for one. Owned by its request's beams."""

    def __init__(self, params: SamplingParams) -> None:
        assert params.beam is not None
        self._params = params
        self._beam = params.beam
        self._ends = {*params.eos_token_ids, *params.stop_token_ids}
        self._beams = [_Beam((), 0.0)]
        self._complete: list[Hypothesis] = []

    def advance(self, candidates: Sequence[TokenLogprobs]) -> list[Continuation]:
        """Take the likeliest next tokens of each beam, ``params.beam.num_candidates`` or the whole vocabulary.

        Return the beams of the next step as continuations of the present ones, in order; none when it is over.
        """
        likeliest = self._likeliest(candidates)
        length = len(self._beams[0].output_ids) + 1
        if length == self._params.max_tokens:
            self._complete_with(likeliest[: self._beam.width], length)
            return []
        self._complete_with([one for one in likeliest[: self._beam.width] if one.token_id in self._ends], length)
        chosen = [one for one in likeliest if one.token_id not in self._ends][: self._beam.width]
        self._beams = [_Beam(self._output_of(one), one.score) for one in chosen]
        return [] if self._is_over(length) else chosen

    def best(self, count: int) -> list[Hypothesis]:
        """Return the ``count`` best complete answers, the best first."""
        return self._complete[:count]

    def _likeliest(self, candidates: Sequence[TokenLogprobs]) -> list[Continuation]:
        found = [
            Continuation(parent, token_id, beam.score + logprob)
            for parent, (beam, known) in enumerate(zip(self._beams, candidates, strict=True))
            for token_id, logprob in zip(known.top_ids, known.top_logprobs, strict=True)
        ]
        return nlargest(self._beam.num_candidates(len(self._ends)), found, key=lambda one: one.score)

    def _complete_with(self, ended: Sequence[Continuation], length: int) -> None:
        """Keep the best of what was complete and what is now."""
        self._complete += [
            Hypothesis(
                self._output_of(one),
                one.score / length**self._beam.length_penalty,
                FinishReason.STOP if one.token_id in self._ends else FinishReason.LENGTH,
            )
            for one in ended
        ]
        self._complete = nlargest(self._beam.width, self._complete, key=lambda one: one.score)

    def _is_over(self, length: int) -> bool:
        if len(self._complete) < self._beam.width:
            return False
        if self._beam.early_stopping is True:
            return True
        penalty = self._beam.length_penalty
        favours_long = self._beam.early_stopping == "never" and penalty > 0
        best_length = self._params.max_tokens if favours_long else length
        best_score: float = self._beams[0].score / best_length**penalty
        return best_score <= self._complete[-1].score

    def _output_of(self, one: Continuation) -> tuple[int, ...]:
        return (*self._beams[one.parent].output_ids, one.token_id)

"""Beam search by itself: with room for everything it finds the best answer there is, and each rule ends it in time."""

import itertools
import math
import random
from collections.abc import Iterator

import pytest

from common.logprobs import TokenLogprobs
from common.sampling import BeamParams, FinishReason, SamplingParams
from decode_worker.beam_search import BeamSearch

VOCAB, END, LENGTH = 4, 3, 4


class Chain:
    """A model of which the next token depends on the last one alone."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self._rows = [[rng.uniform(0.05, 1.0) for _ in range(VOCAB)] for _ in range(VOCAB + 1)]

    def logprob(self, last: int, token_id: int) -> float:
        return math.log(self._rows[last][token_id] / sum(self._rows[last]))

    def known(self, last: int) -> TokenLogprobs:
        ranked = sorted(range(VOCAB), key=lambda token_id: -self.logprob(last, token_id))
        return TokenLogprobs(0.0, 1, tuple(ranked), tuple(self.logprob(last, token_id) for token_id in ranked))

    def score(self, token_ids: tuple[int, ...], penalty: float) -> float:
        pairs = itertools.pairwise((VOCAB, *token_ids))
        return sum(self.logprob(*pair) for pair in pairs) / len(token_ids) ** penalty


def run(chain: Chain, beam: BeamParams, max_tokens: int = LENGTH) -> tuple[BeamSearch, int]:
    """Return the search, which is over, and its steps."""
    search = BeamSearch(SamplingParams(max_tokens, eos_token_ids=(END,), beam=beam))
    lasts, num_steps = [VOCAB], 0
    while lasts:
        lasts = [one.token_id for one in search.advance([chain.known(last) for last in lasts])]
        num_steps += 1
    return search, num_steps


def every_answer() -> Iterator[tuple[int, ...]]:
    for length in range(1, LENGTH + 1):
        for head in itertools.product(range(END), repeat=length - 1):
            yield (*head, END)
    yield from itertools.product(range(END), repeat=LENGTH)


@pytest.mark.parametrize("penalty", [0.0, 1.0, -0.5])
def test_with_a_beam_for_every_text_the_best_answers_are_found(penalty: float) -> None:
    for seed in range(10):
        chain = Chain(seed)
        ranked = sorted(every_answer(), key=lambda token_ids: -chain.score(token_ids, penalty))
        search, _ = run(chain, BeamParams(VOCAB**LENGTH, penalty, "never"))
        found = search.best(5)
        assert [one.output_ids for one in found] == ranked[:5]
        assert [one.score for one in found] == pytest.approx([chain.score(one.output_ids, penalty) for one in found])


def test_answers_say_how_they_ended() -> None:
    for seed in range(10):
        search, _ = run(Chain(seed), BeamParams(3))
        for answer in search.best(3):
            is_stop = answer.output_ids[-1] == END
            assert answer.finish is (FinishReason.STOP if is_stop else FinishReason.LENGTH)
            assert is_stop or len(answer.output_ids) == LENGTH


def test_early_stopping_ends_sooner_and_never_looks_longest() -> None:
    steps = {
        rule: sum(run(Chain(seed), BeamParams(2, 1.0, rule), 40)[1] for seed in range(20))
        for rule in (True, False, "never")
    }
    assert steps[True] <= steps[False] < steps["never"] <= 20 * 40

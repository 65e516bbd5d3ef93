"""Sampling against a plain reference, against chance, and for independence of the batch."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common.errors import InternalError
from common.model.history import TokenHistory
from common.model.sample_row import SampleRow
from common.model.sampler import sample
from common.sampling import SamplingParams
from tests.support.plain_sampler import PlainCase, edited, kept_weights, plain_sample

VOCAB = 400
EOS, STOP = 2, 7


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)  # type: ignore[arg-type]


def random_case(rng: random.Random) -> PlainCase:
    """Return parameters that use about a third of everything there is, behind a short text of few tokens."""

    def maybe(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.35 else otherwise

    def some(count: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCAB), count))

    chosen = params(
        temperature=rng.choice([0.0, 0.01, 0.3, 0.7, 1.0, 1.0, 1.5, 5.0]),
        top_p=maybe(rng.choice([0.0, 0.1, 0.5, 0.9, 0.95, 0.999]), 1.0),
        top_k=maybe(rng.choice([1, 2, 5, 40, 300, VOCAB, 10 * VOCAB]), 0),
        min_p=maybe(rng.choice([0.001, 0.05, 0.5, 1.0]), 0.0),
        typical_p=maybe(rng.choice([0.1, 0.5, 0.9, 0.99]), 1.0),
        seed=rng.randrange(2**64),
        repetition_penalty=maybe(rng.choice([0.5, 1.1, 1.3, 2.0]), 1.0),
        presence_penalty=maybe(rng.uniform(-2, 2), 0.0),
        frequency_penalty=maybe(rng.uniform(-2, 2), 0.0),
        logit_bias=maybe(tuple((token, rng.uniform(-100, 100)) for token in some(3)), ()),
        allowed_token_ids=maybe(some(rng.choice([1, 2, 30])), ()),
        bad_words=maybe(((5,), (5, 6), (6, 5, 8), some(2)), ()),
        min_tokens=maybe(rng.randrange(12), 0),
        eos_token_ids=(EOS,),
        stop_token_ids=(STOP,),
    )
    prompt = [rng.randrange(10) for _ in range(rng.randrange(1, 12))]
    return PlainCase(chosen, rng.randrange(4), prompt, [rng.randrange(10) for _ in range(rng.randrange(12))])


def as_row(case: PlainCase) -> SampleRow:
    history = TokenHistory(len(case.prompt))
    history.extend([*case.prompt, *case.output])
    position = len(case.prompt) + len(case.output)
    return SampleRow(case.params, case.sample_index, position, len(case.output), history)


def random_cases(count: int, seed: int) -> tuple[torch.Tensor, list[PlainCase]]:
    rng = random.Random(seed)
    spread = torch.tensor([rng.choice([0.1, 1.0, 4.0, 12.0]) for _ in range(count)])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, VOCAB, generator=generator) * spread[:, None]
    return logits, [random_case(rng) for _ in range(count)]


@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_random_parameter_sets_equal_the_plain_reference(seed: int):
    logits, cases = random_cases(1000, seed)
    expected = [plain_sample(row, case) for row, case in zip(logits.tolist(), cases, strict=True)]
    assert sample(logits, [as_row(case) for case in cases]) == expected


def test_a_token_does_not_depend_on_its_batch():
    logits, cases = random_cases(64, seed=100)
    rows = [as_row(case) for case in cases]
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    order = torch.randperm(64)
    assert sample(logits[order], [rows[i] for i in order.tolist()]) == [together[i] for i in order.tolist()]


def test_a_history_that_grew_step_by_step_is_the_one_of_all_tokens_at_once():
    rng = random.Random(5)
    prompt, output = [rng.randrange(600) for _ in range(900)], [rng.randrange(600) for _ in range(300)]
    whole, grown = TokenHistory(900), TokenHistory(900)
    whole.extend(prompt + output)
    for start in range(0, 1200, 70):
        grown.extend((prompt + output)[start : start + 70])
    for history in (whole, grown):
        counts = dict(zip(history.ids.tolist(), history.output_counts.tolist(), strict=True))
        assert counts == {token: output.count(token) for token in {*prompt, *output}}
        assert history.output_ids == output


def chi_square(observed: dict[int, int], expected: dict[int, float]) -> float:
    return sum((observed.get(token, 0) - count) ** 2 / count for token, count in expected.items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"typical_p": 0.6},
        {"temperature": 0.5, "top_k": 6, "top_p": 0.9},
        {"temperature": 1.5, "min_p": 0.1, "logit_bias": ((3, 2.0),)},
    ],
)
def test_frequencies_follow_the_distribution(changes: dict[str, Any]):
    draws = 4000
    logits = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.0, 1.5, 0.2, -0.5])
    chosen = params(**({"temperature": 1.0, "seed": 9} | changes))
    rows = [SampleRow(chosen, 0, position) for position in range(draws)]
    tokens = sample(logits.expand(draws, -1), rows)
    observed = {token: tokens.count(token) for token in set(tokens)}
    scores = edited(logits.tolist(), PlainCase(chosen, 0, [], []))
    weights = kept_weights([(x - max(scores)) / chosen.temperature for x in scores], chosen)
    expected = {token: draws * weight / sum(weights) for token, weight in enumerate(weights) if weight}
    assert set(observed) <= set(expected)
    # 0.9999 quantile of chi-square with 7 degrees of freedom, the most that there can be
    assert chi_square(observed, expected) < 29.9


def test_the_same_seed_gives_the_same_tokens_and_another_index_others():
    logits = torch.zeros(200, 50)
    first, second = ([SampleRow(params(seed=5), index, position) for position in range(200)] for index in (0, 1))
    assert sample(logits, first) == sample(logits, first)
    assert sample(logits, first) != sample(logits, second)


def test_logits_that_are_rounded_otherwise_give_the_same_tokens():
    logits = 2 * torch.randn(400, 50_000, generator=torch.Generator().manual_seed(11))
    rounded = logits + 3e-5 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(12))
    for changes in ({}, {"top_p": 0.95}, {"top_k": 40}):
        rows = [SampleRow(params(temperature=1.0, seed=1, **changes), 0, position) for position in range(len(logits))]
        assert sum(a != b for a, b in zip(sample(logits, rows), sample(rounded, rows), strict=True)) <= 1


def test_greedy_takes_the_first_of_equals_and_ignores_the_seed():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    for seed in range(20):
        assert sample(logits, [SampleRow(params(temperature=0.0, seed=seed), 0, 7)]) == [1]


def test_equals_of_the_last_kept_token_are_kept():
    logits = torch.tensor([1.0, 5.0, 1.0, 1.0, -2.0]).expand(400, -1)
    for changes in ({"top_k": 2}, {"top_p": 0.96}):
        rows = [SampleRow(params(temperature=1.0, seed=1, **changes), 0, position) for position in range(400)]
        assert set(sample(logits, rows)) == {0, 1, 2, 3}


def test_forbidden_tokens_are_never_drawn():
    logits = torch.full((300, 20), float("-inf"))
    logits[:, [3, 11]] = 0.0
    rows = [SampleRow(params(temperature=2.0, seed=2), 0, position) for position in range(300)]
    assert set(sample(logits, rows)) == {3, 11}


def test_a_tiny_temperature_is_greedy_without_overflow():
    logits = torch.tensor([[1.0, 1.5, -2.0]])
    assert sample(logits, [SampleRow(params(temperature=5e-324), 0, 0)]) == [1]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error_not_a_token(value: float):
    logits = torch.zeros(2, 5)
    logits[1, 3] = value
    with pytest.raises(InternalError, match="not finite"):
        sample(logits, [SampleRow(params(temperature=temperature), 0, 0) for temperature in (0.0, 1.0)])


def test_nothing_to_sample_and_a_wrong_count():
    assert sample(torch.zeros(0, 5), []) == []
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(2, 5), [])


def test_ends_wait_for_min_tokens_unless_nothing_else_is_left():
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0]])
    held = params(temperature=0.0, eos_token_ids=(2,), min_tokens=3)
    assert sample(logits, [SampleRow(held, 0, 7, num_output_tokens=2)]) == [3]
    assert sample(logits, [SampleRow(held, 0, 8, num_output_tokens=3)]) == [2]
    only_end = params(temperature=0.0, eos_token_ids=(2,), min_tokens=3, allowed_token_ids=(2,))
    assert sample(logits, [SampleRow(only_end, 0, 7, num_output_tokens=2)]) == [2]


@pytest.mark.parametrize("seed", range(3))
def test_only_allowed_tokens_are_drawn_as_if_the_others_were_not_there(seed: int):
    logits, cases = random_cases(300, seed=200 + seed)
    rng = random.Random(seed)
    cases = [replace(case, params=msgspec.structs.replace(case.params, allowed_token_ids=())) for case in cases]
    chosen = [tuple(sorted(rng.sample(range(VOCAB), rng.choice([1, 2, 30, 200, VOCAB])))) for _ in cases]
    expected = []
    for logit_row, case, ids in zip(logits, cases, chosen, strict=True):
        out = torch.full((VOCAB,), float("-inf"))
        out[list(ids)] = logit_row[list(ids)]
        expected.append(plain_sample(out.tolist(), case))
    rows = []
    for case, ids in zip(cases, chosen, strict=True):
        allowed = np.zeros(VOCAB, dtype=np.bool_)
        allowed[list(ids)] = True
        rows.append(replace(as_row(case), allowed=allowed))
    assert sample(logits, rows) == expected

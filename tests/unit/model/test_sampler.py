"""Sampling against a plain reference, against chance, and for independence of the batch."""

import math
import random

import pytest
import torch

from common.errors import InternalError
from common.model.sampler import SampleRow, sample
from common.sampling import SamplingParams, uniform

VOCAB = 700
"""More than the head that is looked at before a whole row is sorted."""


def by_definition(logits: list[float], row: SampleRow) -> int:
    """Sample one row with Python numbers, from the docstring of the sampler alone."""
    params, best = row.params, max(logits)
    if params.temperature == 0:
        return logits.index(best)
    weights = [math.exp((logit - best) / params.temperature) for logit in logits]
    kept = sorted(weights, reverse=True)
    if 0 < params.top_k < len(kept):
        kept = [weight for weight in kept if weight >= kept[params.top_k - 1]]
    least = kept[-1]
    if params.top_p < 1:
        total, running = math.fsum(kept), 0.0
        for weight in kept:
            running += weight
            least = weight
            if running >= params.top_p * total:
                break
    kept_weights = [weight if weight >= least else 0.0 for weight in weights]
    target = uniform(params.seed, row.sample_index, row.position) * math.fsum(kept_weights)
    running = 0.0
    for token_id, weight in enumerate(kept_weights):
        running += weight
        if running > target:
            return token_id
    raise AssertionError("the numbers do not add up")


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)  # type: ignore[arg-type]


def random_rows(count: int, seed: int) -> tuple[torch.Tensor, list[SampleRow]]:
    rng = random.Random(seed)
    spread = torch.tensor([rng.choice([0.1, 1.0, 4.0, 12.0]) for _ in range(count)])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, VOCAB, generator=generator) * spread[:, None]
    rows = [
        SampleRow(
            params(
                temperature=rng.choice([0.0, 0.01, 0.3, 0.7, 1.0, 1.5, 5.0]),
                top_p=rng.choice([0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0, 1.0]),
                top_k=rng.choice([0, 0, 1, 2, 5, 40, 600, VOCAB, 10 * VOCAB]),
                seed=rng.randrange(2**64),
            ),
            sample_index=rng.randrange(4),
            position=rng.randrange(5000),
        )
        for _ in range(count)
    ]
    return logits, rows


@pytest.mark.parametrize("seed", range(8))
def test_random_parameters_equal_the_plain_reference(seed: int):
    logits, rows = random_rows(64, seed)
    assert sample(logits, rows) == [by_definition(logits[i].tolist(), row) for i, row in enumerate(rows)]


def test_a_token_does_not_depend_on_its_batch():
    logits, rows = random_rows(64, seed=100)
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    order = torch.randperm(64)
    assert sample(logits[order], [rows[i] for i in order.tolist()]) == [together[i] for i in order.tolist()]


def chi_square(observed: dict[int, int], expected: dict[int, float]) -> float:
    return sum((observed.get(token, 0) - count) ** 2 / count for token, count in expected.items())


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.7}, {"temperature": 0.5, "top_k": 6, "top_p": 0.9}])
def test_frequencies_follow_the_distribution(changes: dict[str, float]):
    draws = 4000
    logits = torch.tensor([1.0, 0.5, 2.0, -1.0, 0.0, 1.5, 0.2, -0.5])
    chosen = params(**({"temperature": 1.0, "seed": 9} | changes))
    rows = [SampleRow(chosen, 0, position) for position in range(draws)]
    tokens = sample(logits.expand(draws, -1), rows)
    observed = {token: tokens.count(token) for token in set(tokens)}
    weights = torch.softmax(logits.double() / chosen.temperature, 0)
    kept: list[int] = []
    for token in weights.argsort(descending=True).tolist()[: chosen.top_k or None]:
        inside = weights[weights.argsort(descending=True)[: chosen.top_k or None]].sum()
        if float(weights[kept].sum() / inside) < chosen.top_p:
            kept.append(token)
    expected = {token: draws * float(weights[token] / weights[kept].sum()) for token in kept}
    assert set(observed) <= set(expected)
    # 0.9999 quantile of chi-square with 7 degrees of freedom, the most that there can be
    assert chi_square(observed, expected) < 29.9


def test_the_same_seed_gives_the_same_tokens_and_another_index_others():
    logits = torch.zeros(200, 50)
    first, second = ([SampleRow(params(seed=5), index, position) for position in range(200)] for index in (0, 1))
    assert sample(logits, first) == sample(logits, first)
    assert sample(logits, first) != sample(logits, second)


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

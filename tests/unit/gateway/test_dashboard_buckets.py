"""Quantiles and means between two looks at a histogram."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from gateway.dashboard.buckets import Buckets
from gateway.dashboard.reading import buckets_of

BOUNDS = (0.1, 0.2, 0.4, float("inf"))


def observed(values: Sequence[float]) -> Buckets:
    return Buckets(BOUNDS, tuple(sum(value <= bound for value in values) for bound in BOUNDS), sum(values))


def test_nothing_has_no_quantile_and_no_mean() -> None:
    assert Buckets().quantile(0.5) is None
    assert observed([]).quantile(0.95) is None
    assert observed([]).mean() is None


def test_observations_lie_evenly_in_their_bucket() -> None:
    assert observed([0.15] * 10).quantile(0.5) == pytest.approx(0.15)
    assert observed([0.05, 0.15, 0.3, 0.3]).quantile(0.75) == pytest.approx(0.3)


def test_what_is_above_the_last_bound_counts_as_lying_on_it() -> None:
    assert observed([99.0]).quantile(0.5) == 0.4


def test_only_what_came_between_two_looks_counts() -> None:
    before, after = observed([0.05] * 100), observed([0.05] * 100 + [0.3] * 3)
    assert after.since(before).num_observations == 3
    assert after.since(before).mean() == pytest.approx(0.3)
    assert after.since(before).quantile(0.5) == pytest.approx(0.3)
    assert after.since(Buckets()) == after


@given(st.lists(st.floats(0.001, 0.39), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[float], q: float) -> None:
    ranked = sorted(values)
    true = ranked[min(len(ranked) - 1, max(0, -int(-q * len(ranked) // 1) - 1))]
    high = next(bound for bound in BOUNDS if true <= bound)
    low = max((bound for bound in (0.0, *BOUNDS) if bound < high), default=0.0)
    found = observed(values).quantile(q)
    assert found is not None
    assert low - 1e-9 <= found <= high + 1e-9


def test_a_real_histogram_is_read_with_its_bounds_and_sum() -> None:
    histogram = Histogram("x", "x", buckets=(0.1, 0.2, 0.4), registry=CollectorRegistry())
    for value in (0.05, 0.15, 0.3, 9.0):
        histogram.observe(value)
    assert buckets_of(histogram) == observed([0.05, 0.15, 0.3, 9.0])

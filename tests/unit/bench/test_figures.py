"""The figures of a run, against figures worked out by hand and by numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compose.bench.answer import Answer
from compose.bench.figures import Run, figures, percentile
from compose.bench.lag import client_warnings


def answer(sent_at: float, *token_times: float, prompt_len: int = 10, cached: int = 0) -> Answer:
    return Answer(
        prompt_len,
        sent_at=sent_at,
        ended_at=token_times[-1],
        token_times=list(token_times),
        output_len=len(token_times),
        cached_tokens=cached,
    )


RUN = Run(
    [
        answer(0.0, 0.1, 0.2, 0.4, prompt_len=30, cached=16),
        answer(0.3, 0.8, 1.0),
        answer(1.5, 1.75),
        Answer(10, sent_at=0.0, ended_at=2.0, error="status 429"),
    ],
    duration_s=2.0,
)


def test_throughputs_count_what_was_answered() -> None:
    found = figures(RUN, (99,), {})
    assert (found["completed"], found["failed"], found["duration"]) == (3, 1, 2.0)
    assert (found["total_input_tokens"], found["total_output_tokens"], found["total_cached_tokens"]) == (50, 6, 16)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (
        1.5,
        3.0,
        28.0,
    )
    assert (found["max_concurrent_requests"], found["max_output_tokens_per_s"]) == (2, 4.0)
    assert found["request_goodput"] is None


def test_latencies_are_in_milliseconds_and_tpot_leaves_the_first_token_out() -> None:
    found = figures(RUN, (50, 90), {})
    assert found["mean_ttft_ms"] == pytest.approx((100 + 500 + 250) / 3)
    assert found["median_ttft_ms"] == found["p50_ttft_ms"] == pytest.approx(250)
    assert found["mean_tpot_ms"] == pytest.approx((150 + 200) / 2)
    assert found["mean_itl_ms"] == pytest.approx((100 + 200 + 200) / 3)
    assert found["mean_e2el_ms"] == pytest.approx((400 + 700 + 250) / 3)
    assert found["std_tpot_ms"] == pytest.approx(25)


def test_goodput_counts_requests_that_meet_every_goal() -> None:
    assert figures(RUN, (), {"ttft": 300})["request_goodput"] == 1.0
    assert figures(RUN, (), {"ttft": 300, "tpot": 140})["request_goodput"] == 0.5
    assert figures(RUN, (), {"ttft": 600, "tpot": 250, "itl": 250, "e2el": 800})["request_goodput"] == 1.5


def test_a_run_in_which_all_failed_has_figures() -> None:
    found = figures(Run([Answer(1, error="no")], 1.0), (99,), {"ttft": 1})
    assert (found["completed"], found["failed"], found["p99_ttft_ms"], found["request_goodput"]) == (0, 1, 0.0, 0.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], p: float) -> None:
    assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)), abs=1e-6)


def test_a_generator_that_was_short_of_time_says_so() -> None:
    assert client_warnings(0.002, 0.001, 0.3) == []
    assert "event loop was late by 25 ms" in client_warnings(0.025, 0.0, 0.3)[0]
    assert "sent 80 ms late" in client_warnings(0.0, 0.08, 0.3)[0]
    assert "97 % of a core" in client_warnings(0.0, 0.0, 0.97)[0]

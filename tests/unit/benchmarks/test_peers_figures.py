"""Figures of the comparison with peers, against figures worked out by hand."""

import pytest

from benchmarks.peers.budget import QUICK
from benchmarks.peers.figures import decode_rate, good_share, highest_rate, is_good, latencies, most_good, prefill_rate
from benchmarks.peers.load import Seen


def seen(*token_times_s: float, sent_s: float = 0.0, tokens: int = 0, prompt: int = 100, error: str = "") -> Seen:
    return Seen(sent_s, list(token_times_s), prompt, tokens or len(token_times_s), 0, error)


def test_decode_counts_only_while_the_whole_batch_decodes() -> None:
    early, late = seen(1.0, 1.5, 2.0, 2.5, 3.0), seen(2.0, 2.5, 3.0, 3.5, 4.0)
    assert decode_rate([early, late]) == pytest.approx(4.0)  # from 2.0 to 3.0: two tokens of each
    assert decode_rate([early]) == pytest.approx(2.0)


def test_decode_counts_tokens_and_not_events() -> None:
    assert decode_rate([seen(1.0, 2.0, 3.0, tokens=6)]) == pytest.approx(2.0)


def test_answers_that_never_overlap_have_no_decode_rate() -> None:
    assert decode_rate([seen(1.0, 2.0), seen(2.0, 3.0)]) == 0.0
    assert decode_rate([seen(1.0, 2.0), seen(error="refused")]) == 0.0


def test_prefill_is_the_median_over_prompts() -> None:
    answers = [seen(0.1), seen(1.2, sent_s=1.0), seen(7.0, sent_s=2.0)]
    assert prefill_rate(answers) == pytest.approx(500.0)


def test_latencies_leave_out_answers_without_a_token() -> None:
    found = latencies([seen(0.5, 0.6, 0.9), seen(error="refused")])
    assert found["ttft_p50_ms"] == pytest.approx(500.0)
    assert found["itl_p50_ms"] == pytest.approx(200.0)
    assert latencies([seen(0.5)]).keys() == {"ttft_p50_ms", "ttft_p99_ms"}


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (seen(2.0, 2.15, 2.30), True),
        (seen(2.1, 2.2), False),  # first token late
        (seen(0.1, 0.2, 0.6), False),  # gaps of 250 ms on average
        (seen(0.1), True),  # a single token has no gap
        (seen(0.1, 0.2, error="no answer within 6 s"), False),
        (seen(), False),
    ],
)
def test_a_request_is_good_inside_both_limits(answer: Seen, expected: bool) -> None:
    assert is_good(answer, QUICK) is expected


def test_share_of_good_requests_counts_those_that_failed() -> None:
    assert good_share([seen(0.1), seen(9.0), seen(error="refused"), seen(0.2)], QUICK) == 0.5


def test_the_highest_rate_ends_where_the_share_first_falls() -> None:
    assert highest_rate({1.0: 1.0, 2.0: 0.9, 4.0: 0.5}) == 2.0
    assert highest_rate({1.0: 0.8, 2.0: 1.0}) == 0.0
    assert highest_rate({}) == 0.0
    assert most_good({1.0: 1.0, 2.0: 0.9, 4.0: 0.5}) == 2.0
    assert most_good({1.0: 1.0, 2.0: 0.9, 4.0: 0.4}) == pytest.approx(1.8)

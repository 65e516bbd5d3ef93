"""Figures from what a client saw. Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.peers.budget import Budget
from benchmarks.peers.load import Seen
from compose.bench.figures import percentile

SHARE_INSIDE = 0.9
"""Share of requests that must be good for a rate to count as served."""


def decode_rate(answers: Sequence[Seen]) -> float:
    """Return tokens a second while all of these answers were being written.

    From the moment when the last of them has begun to the one when the first of them ends, so neither prompts nor an
    emptying batch are in it. Events are counted as as many tokens as the answer's events carry on average. 0 when the
    answers were never all being written.
    """
    if not answers or not all(answer.token_times_s for answer in answers):
        return 0.0
    begin = max(answer.token_times_s[0] for answer in answers)
    end = min(answer.token_times_s[-1] for answer in answers)
    if end <= begin:
        return 0.0
    return sum(_tokens_within(answer, begin, end) for answer in answers) / (end - begin)


def _tokens_within(answer: Seen, begin: float, end: float) -> float:
    events = sum(begin < at <= end for at in answer.token_times_s)
    return events * answer.answer_len / len(answer.token_times_s)


def prefill_rate(answers: Sequence[Seen]) -> float:
    """Return prompt tokens a second: the median over prompts that were sent one after the other."""
    return statistics.median(answer.prompt_len / answer.ttft_s for answer in answers)


def latencies(answers: Iterable[Seen]) -> dict[str, float]:
    """Return TTFT and ITL in milliseconds, median and 99th percentile, of all answers that have a token."""
    begun = [answer for answer in answers if answer.token_times_s]
    found = {}
    for name, values in {
        "ttft": [answer.ttft_s for answer in begun],
        "itl": [gap for answer in begun for gap in answer.itls_s],
    }.items():
        found |= {f"{name}_p{p}_ms": 1e3 * percentile(values, p) for p in (50, 99) if values}
    return found


def is_good(answer: Seen, budget: Budget) -> bool:
    """Whether an answer is complete, its first token in time, and its gaps short enough on average."""
    if answer.error or not answer.token_times_s:
        return False
    mean_gap_s = statistics.fmean(answer.itls_s or [0.0])
    return 1e3 * answer.ttft_s <= budget.ttft_limit_ms and 1e3 * mean_gap_s <= budget.itl_limit_ms


def good_share(answers: Sequence[Seen], budget: Budget) -> float:
    """Return the share of requests that were answered inside the limits."""
    return sum(is_good(answer, budget) for answer in answers) / len(answers)


def highest_rate(shares: Mapping[float, float]) -> float:
    """Return the highest rate up to which, at every rate, :data:`SHARE_INSIDE` of the requests are good; or 0."""
    best = 0.0
    for rate in sorted(shares):
        if shares[rate] < SHARE_INSIDE:
            break
        best = rate
    return best


def most_good(shares: Mapping[float, float]) -> float:
    """Return the most good requests a second at any of the rates."""
    return max((rate * share for rate, share in shares.items()), default=0.0)

"""The figures of a run, under the names and by the definitions that people know from vLLM's benchmark. Pure.

    ttft   from sending a request to the first event with text
    tpot   (last event - first event) / (output tokens - 1): without the first token; none of a single token
    itl    gaps between events with text, over all requests
    e2el   from sending a request to the last event with text

Output tokens are the server's count. Only answers that did not fail are measured; goodput counts those that meet every
goal, and a request with one token meets any tpot or itl.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compose.bench.answer import Answer

METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class Run:
    """What was measured."""

    answers: Sequence[Answer]
    duration_s: float
    """From the first request's sending to the last answer's end."""


def figures(run: Run, percentiles: Sequence[float], goals: Mapping[str, float]) -> dict[str, Any]:
    """Return all figures by name; latencies in milliseconds."""
    done = [answer for answer in run.answers if not answer.error]
    input_tokens = sum(answer.prompt_len for answer in done)
    output_tokens = sum(answer.output_len for answer in done)
    seconds = run.duration_s or 1e-9
    found: dict[str, Any] = {
        "duration": round(run.duration_s, 6),
        "completed": len(done),
        "failed": len(run.answers) - len(done),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "total_cached_tokens": sum(answer.cached_tokens for answer in done),
        "request_throughput": len(done) / seconds,
        "request_goodput": sum(_is_good(answer, goals) for answer in done) / seconds if goals else None,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (input_tokens + output_tokens) / seconds,
        "max_output_tokens_per_s": _most_in_a_second(done),
        "max_concurrent_requests": _most_at_once(done),
    }
    for name in METRICS:
        found |= _latency(name, list(_values_ms(name, done)), percentiles)
    return found


def percentile(values: Sequence[float], p: float) -> float:
    """Return a percentile, interpolated between neighbours as numpy does; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def _latency(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    found = {
        f"mean_{name}_ms": statistics.fmean(values) if values else 0.0,
        f"median_{name}_ms": percentile(values, 50),
        f"std_{name}_ms": statistics.pstdev(values) if values else 0.0,
    }
    return found | {f"p{p:g}_{name}_ms": percentile(values, p) for p in percentiles}


def _values_ms(name: str, answers: Iterable[Answer]) -> Iterable[float]:
    for answer in answers:
        yield from (value * 1000 for value in _OF[name](answer))


_OF: dict[str, Callable[[Answer], Sequence[float]]] = {
    "ttft": lambda answer: [answer.ttft_s],
    "tpot": lambda answer: [] if answer.tpot_s is None else [answer.tpot_s],
    "itl": lambda answer: answer.itls_s,
    "e2el": lambda answer: [answer.e2el_s],
}


def _is_good(answer: Answer, goals: Mapping[str, float]) -> bool:
    """Whether an answer meets every goal; its mean gap is held against one for itl."""
    return all(statistics.fmean(_OF[name](answer) or [0.0]) * 1000 <= limit for name, limit in goals.items())


def _most_in_a_second(answers: Sequence[Answer]) -> float:
    """Return the most events with text in any second, counted from the first request."""
    start = min((answer.sent_at for answer in answers), default=0.0)
    counts = Counter(int(at - start) for answer in answers for at in answer.token_times)
    return float(max(counts.values(), default=0))


def _most_at_once(answers: Sequence[Answer]) -> int:
    changes = sorted([(answer.sent_at, 1) for answer in answers] + [(answer.ended_at, -1) for answer in answers])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most

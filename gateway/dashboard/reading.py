"""One look at everything that a gateway has measured since its start."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import Counter, Histogram

from gateway.dashboard.buckets import Buckets
from gateway.telemetry.cache_ledger import CacheCounts
from gateway.telemetry.metrics import Metrics

_NOTHING = Buckets()
_NO_COUNTS = CacheCounts()


@dataclass(frozen=True, slots=True)
class RouteKey:
    """Who computed a prompt, and why."""

    plan: str
    reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Counts from the gateway's start to ``at``, in seconds of the event loop's clock."""

    at: float
    ttft: Buckets = _NOTHING
    itl: Buckets = _NOTHING
    queue: Buckets = _NOTHING
    prefill: Buckets = _NOTHING
    decode: Buckets = _NOTHING
    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    routes: dict[RouteKey, float] = field(default_factory=dict)
    cache: CacheCounts = _NO_COUNTS
    """Of the workers, in the last minute before ``at``."""


def read(metrics: Metrics, cache: CacheCounts, at: float) -> Reading:
    """Return what ``metrics`` say now."""
    return Reading(
        at=at,
        ttft=buckets_of(metrics.ttft),
        itl=buckets_of(metrics.itl),
        queue=buckets_of(metrics.queue_time),
        prefill=buckets_of(metrics.prefill_time),
        decode=buckets_of(metrics.decode_time),
        prompt_tokens=_value(metrics.prompt_tokens),
        generation_tokens=_value(metrics.generation_tokens),
        routes=_routes(metrics.routes),
        cache=cache,
    )


def buckets_of(histogram: Histogram) -> Buckets:
    """Return what a histogram without labels has counted."""
    samples = next(iter(histogram.collect())).samples
    found = [(float(one.labels["le"]), one.value) for one in samples if one.name.endswith("_bucket")]
    total: Sequence[float] = [one.value for one in samples if one.name.endswith("_sum")]
    return Buckets(tuple(bound for bound, _ in found), tuple(count for _, count in found), sum(total))


def _value(counter: Counter) -> float:
    return sum(one.value for one in next(iter(counter.collect())).samples if one.name.endswith("_total"))


def _routes(counter: Counter) -> dict[RouteKey, float]:
    samples = next(iter(counter.collect())).samples
    return {
        RouteKey(one.labels["plan"], one.labels["reason"]): one.value for one in samples if one.name.endswith("_total")
    }

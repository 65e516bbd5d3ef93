"""What the dashboard shows of one second: a point of its charts, and the state of everything else.

Made from two or more looks at the gateway's measurements, the cluster's view and the prefix ledger. Pure.
"""

from collections.abc import Sequence

import msgspec

from common.messages import Role, WorkerRecord
from gateway.cluster_status import ClusterStatus
from gateway.dashboard.buckets import Buckets
from gateway.dashboard.reading import Reading, RouteKey

RATE_S = 5.0
LATENCY_S = 10.0
WINDOW_S = 60.0
"""How far rates, latencies, and shares (routes, stages, hits) look back."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One second of the charts; None where nothing was observed."""

    time: int
    """Unix time in seconds."""
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    waiting_prefill: int
    """Sequences that wait on prefill workers."""
    waiting_decode: int
    running: int
    """Sequences that run, on all workers."""
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    hit_rate: float | None
    """Share of the prompt tokens of the last minute that were cached."""


class RouteCount(msgspec.Struct, frozen=True):
    """Prompts that were planned alike."""

    plan: str
    reason: str
    recent: int
    """In the last minute."""
    total: int
    """Since the gateway's start."""


class Stages(msgspec.Struct, frozen=True):
    """Where an answer's time goes: means of the last minute; None where nothing was observed."""

    queue_ms: float | None
    """From arrival to the prompt's first work."""
    prefill_ms: float | None
    """From there to the first token: computing the prompt, and handing it over."""
    decode_ms: float | None
    """From the first token to the last."""


class HandOvers(msgspec.Struct, frozen=True):
    """Blocks that decode workers have pulled, since the workers' starts."""

    pulls: int
    failed: int
    tokens: int


class PrefixRow(msgspec.Struct, frozen=True):
    """One shared prefix."""

    hash: str
    first_words: str
    tokens: int
    requests: int
    hit_rate: float
    saved_tokens: int


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """One event of the dashboard's stream."""

    point: Point
    cluster: ClusterStatus
    requests_in_flight: int
    routes: list[RouteCount]
    stages: Stages
    hand_overs: HandOvers
    prefixes: list[PrefixRow] | None
    """None for viewers who may not see what others have asked."""


class History(msgspec.Struct, frozen=True, tag="history"):
    """The first event of a stream: what the gateway is, and its last minutes."""

    model: str
    version: str
    fields: tuple[str, ...]
    """Names of a point's values."""
    points: list[Point]


def make_point(readings: Sequence[Reading], records: Sequence[WorkerRecord], unix_time: int) -> Point:
    """Return the newest second; ``readings`` are the looks of the last minute, newest last."""
    now, recent = readings[-1], earlier(readings, LATENCY_S)
    ttft, itl = now.ttft.since(recent.ttft), now.itl.since(recent.itl)
    rate = earlier(readings, RATE_S)
    return Point(
        time=unix_time,
        ttft_p50_ms=_quantile_ms(ttft, 0.5),
        ttft_p95_ms=_quantile_ms(ttft, 0.95),
        itl_p50_ms=_quantile_ms(itl, 0.5),
        itl_p95_ms=_quantile_ms(itl, 0.95),
        waiting_prefill=_waiting(records, Role.PREFILL),
        waiting_decode=_waiting(records, Role.DECODE),
        running=sum(record.load.running for record in records),
        prompt_tokens_per_s=_per_s(now.prompt_tokens - rate.prompt_tokens, now.at - rate.at),
        generation_tokens_per_s=_per_s(now.generation_tokens - rate.generation_tokens, now.at - rate.at),
        hit_rate=round(now.cache.hits / now.cache.queries, 4) if now.cache.queries else None,
    )


def route_counts(readings: Sequence[Reading]) -> list[RouteCount]:
    """Return how prompts were planned, the most frequent first."""
    now, before = readings[-1].routes, earlier(readings, WINDOW_S).routes
    ordered = sorted(now, key=lambda key: (-now[key], key.plan, key.reason))
    return [_route_count(key, now, before) for key in ordered]


def stages(readings: Sequence[Reading]) -> Stages:
    """Return where the time of the last minute's answers went."""
    now, before = readings[-1], earlier(readings, WINDOW_S)
    return Stages(
        _mean_ms(now.queue.since(before.queue)),
        _mean_ms(now.prefill.since(before.prefill)),
        _mean_ms(now.decode.since(before.decode)),
    )


def hand_overs(records: Sequence[WorkerRecord]) -> HandOvers:
    """Return what the decode workers count."""
    counters = [record.counters for record in records if record.role is Role.DECODE]
    return HandOvers(
        *(sum(one.get(name, 0) for one in counters) for name in ("pulls", "pulls_failed", "pulled_tokens"))
    )


def earlier(readings: Sequence[Reading], window_s: float) -> Reading:
    """Return the newest look that is at least ``window_s`` old, or the oldest there is."""
    start = readings[-1].at - window_s
    return next((one for one in reversed(readings) if one.at <= start), readings[0])


def _route_count(key: RouteKey, now: dict[RouteKey, float], before: dict[RouteKey, float]) -> RouteCount:
    return RouteCount(key.plan, key.reason, int(now[key] - before.get(key, 0.0)), int(now[key]))


def _waiting(records: Sequence[WorkerRecord], role: Role) -> int:
    return sum(record.load.waiting for record in records if record.role is role)


def _per_s(count: float, elapsed_s: float) -> float:
    return round(count / elapsed_s, 1) if elapsed_s > 0 else 0.0


def _quantile_ms(buckets: Buckets, q: float) -> float | None:
    value = buckets.quantile(q)
    return None if value is None else round(value * 1000, 2)


def _mean_ms(buckets: Buckets) -> float | None:
    value = buckets.mean()
    return None if value is None else round(value * 1000, 2)

"""What one second of the dashboard says, from two looks at a gateway."""

from common.messages import Role, WorkerLoad, WorkerRecord
from gateway.dashboard.buckets import Buckets
from gateway.dashboard.reading import Reading, RouteKey
from gateway.dashboard.snapshot import (
    HandOvers,
    RouteCount,
    earlier,
    hand_overs,
    make_point,
    route_counts,
    stages,
)
from gateway.telemetry.cache_ledger import CacheCounts
from tests.support.stub_decode import record

BOUNDS = (0.1, 0.2, float("inf"))
REMOTE, LOCAL = RouteKey("remote", "remote"), RouteKey("local", "short_prompt")


def all_at(seconds: float, count: float) -> Buckets:
    """``count`` observations of ``seconds``, at most 0.2."""
    return Buckets(BOUNDS, (count if seconds <= 0.1 else 0.0, count, count), seconds * count)


def worker(name: str, role: Role, *, running: int = 0, waiting: int = 0, **counters: int) -> WorkerRecord:
    return record(name, role, load=WorkerLoad(running, waiting, 0, 0.0, 0.0), counters=counters)


def test_latencies_are_of_the_last_ten_seconds() -> None:
    readings = [
        Reading(0.0, ttft=all_at(0.05, 1000)),
        Reading(1.0, ttft=all_at(0.05, 1000)),
        Reading(11.0, ttft=Buckets(BOUNDS, (1000, 1010, 1010), 50 + 1.5)),
    ]
    point = make_point(readings, [], unix_time=7)
    assert (point.time, point.ttft_p50_ms, point.ttft_p95_ms) == (7, 150.0, 195.0)
    assert (point.itl_p50_ms, point.itl_p95_ms) == (None, None)


def test_rates_are_of_the_last_five_seconds() -> None:
    readings = [
        Reading(float(second), prompt_tokens=20.0 * second, generation_tokens=float(10 * max(0, second - 6)))
        for second in range(12)
    ]
    point = make_point(readings, [], 0)
    assert (point.prompt_tokens_per_s, point.generation_tokens_per_s) == (20.0, 10.0)


def test_the_first_second_has_no_rates() -> None:
    point = make_point([Reading(3.0, generation_tokens=500.0)], [], 0)
    assert (point.generation_tokens_per_s, point.hit_rate) == (0.0, None)


def test_queues_are_counted_by_role_and_hits_in_tokens() -> None:
    records = [
        worker("prefill-0", Role.PREFILL, running=1, waiting=4),
        worker("decode-0", Role.DECODE, running=8, waiting=2),
        worker("decode-1", Role.DECODE, running=3, waiting=1),
    ]
    point = make_point([Reading(0.0, cache=CacheCounts(queries=400, hits=100))], records, 0)
    assert (point.waiting_prefill, point.waiting_decode, point.running, point.hit_rate) == (4, 3, 12, 0.25)


def test_routes_say_what_was_planned_lately_and_in_all() -> None:
    readings = [
        Reading(0.0, routes={REMOTE: 5.0}),
        Reading(40.0, routes={REMOTE: 7.0}),
        Reading(100.0, routes={REMOTE: 9.0, LOCAL: 30.0}),
    ]
    assert route_counts(readings) == [
        RouteCount("local", "short_prompt", 30, 30),
        RouteCount("remote", "remote", 2, 9),
    ]


def test_stages_are_means_of_the_last_minute() -> None:
    readings = [
        Reading(0.0, queue=all_at(0.2, 50), decode=all_at(0.1, 5)),
        Reading(60.0, queue=Buckets(BOUNDS, (10, 60, 60), 10.0 + 0.4), decode=all_at(0.1, 5)),
    ]
    found = stages(readings)
    assert (found.queue_ms, found.prefill_ms, found.decode_ms) == (40.0, None, None)


def test_hand_overs_are_what_decode_workers_pulled() -> None:
    records = [
        worker("prefill-0", Role.PREFILL, pulls=99),
        worker("decode-0", Role.DECODE, pulls=3, pulls_failed=1, pulled_tokens=700),
        worker("decode-1", Role.DECODE, pulls=2, pulled_tokens=50),
    ]
    assert hand_overs(records) == HandOvers(pulls=5, failed=1, tokens=750)


def test_a_window_that_is_longer_than_the_history_begins_with_it() -> None:
    readings = [Reading(10.0), Reading(11.0), Reading(12.0)]
    assert earlier(readings, 1.5).at == 10.0
    assert earlier(readings, 1.0).at == 11.0
    assert earlier(readings, 60.0).at == 10.0

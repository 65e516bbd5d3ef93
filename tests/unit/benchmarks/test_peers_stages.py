"""Stages of a first token, read from Prometheus text."""

from benchmarks.peers.stages import counters

TEXT = """# TYPE baton_request_queue_time_seconds histogram
baton_request_queue_time_seconds_bucket{le="+Inf"} 4
baton_request_queue_time_seconds_count 4
baton_request_queue_time_seconds_sum 0.5
# TYPE baton_routes counter
baton_routes_total{plan="local",reason="short"} 3
baton_routes_total{plan="local",reason="sooner"} 2
baton_routes_total{plan="remote",reason="sooner"} 7
# TYPE baton_generation_tokens counter
baton_generation_tokens_total 99
"""


def test_sums_counts_and_plans_are_found() -> None:
    assert counters(TEXT) == {
        "baton_request_queue_time_seconds_count": 4,
        "baton_request_queue_time_seconds_sum": 0.5,
        "plans_local": 5,
        "plans_remote": 7,
    }

"""Windows over the workers' counts, and the table of shared prefixes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.ids import BlockHash, Epoch
from common.messages import Role
from gateway.telemetry.cache_ledger import MAX_LIVES, CacheCounts, CacheLedger, total
from gateway.telemetry.prefix_ledger import PrefixLedger
from tests.support.stub_decode import record


def worker(name: str, queries: int, hits: int = 0, role: Role = Role.PREFILL, **changes: Any) -> Any:
    counters = {"prefix_cache_queries": queries, "prefix_cache_hits": hits, "prefix_cache_hits_peer": hits // 2}
    return record(name, role, counters=counters, **changes)


def queries(ledger: CacheLedger, now: float, window_s: float | None) -> int:
    return total(ledger.counts(now, window_s)).queries


def test_a_window_counts_what_happened_in_it() -> None:
    ledger = CacheLedger()
    for now, count in ((0.0, 100), (10.0, 150), (50.0, 150), (100.0, 400)):
        ledger.observe([worker("a", count, count // 2)], now)
    assert queries(ledger, 100.0, 60.0) == 250
    assert queries(ledger, 100.0, 95.0) == 300
    assert queries(ledger, 100.0, None) == 400
    assert ledger.covered_s(100.0, 3600.0) == 100.0
    (counted,) = ledger.counts(100.0, 60.0)
    assert counted.counts == CacheCounts(queries=250, hits=125, peer=63)
    assert counted.counts.local == 62


def test_what_was_counted_before_the_gateway_began_is_in_no_window_and_in_all() -> None:
    ledger = CacheLedger()
    ledger.observe([worker("old", 1000)], 5.0)
    ledger.observe([worker("old", 1000), worker("new", 70)], 6.0)
    assert queries(ledger, 7.0, 60.0) == 70
    assert queries(ledger, 7.0, None) == 1070


def test_a_life_that_is_over_keeps_its_counts_and_the_next_begins_at_zero() -> None:
    ledger = CacheLedger()
    ledger.observe([worker("a", 0)], 0.0)
    ledger.observe([worker("a", 500)], 1.0)
    ledger.observe([worker("a", 20, epoch=Epoch(2))], 2.0)
    assert queries(ledger, 2.0, None) == queries(ledger, 2.0, 60.0) == 520
    assert [one.worker_id for one in ledger.counts(2.0, None)] == ["a"]


def test_lives_are_bounded() -> None:
    ledger = CacheLedger()
    for epoch in range(MAX_LIVES + 10):
        ledger.observe([worker("a", 1, epoch=Epoch(epoch))], float(epoch))
    assert queries(ledger, 1e6, None) == MAX_LIVES


@given(st.lists(st.tuples(st.floats(0.1, 500), st.integers(0, 100)), max_size=40), st.floats(1, 3600))
def test_any_window_equals_the_sum_of_what_came_in_it(steps: list[tuple[float, int]], window_s: float) -> None:
    ledger, now, count, came = CacheLedger(), 0.0, 0, []
    ledger.observe([worker("a", 0)], now)
    for gap_s, more in steps:
        now, count = now + gap_s, count + more
        came.append((now, more))
        ledger.observe([worker("a", count)], now)
    assert queries(ledger, now, window_s) == sum(more for at, more in came if at > now - window_s)


# ---- shared prefixes ----


def chain(*numbers: int) -> list[BlockHash]:
    return [BlockHash(bytes([number])) for number in numbers]


def test_a_prefix_counts_from_its_first_hit_on() -> None:
    ledger = PrefixLedger()
    ledger.begun(range(40), chain(1, 2), 0, 16, 0.0)
    assert ledger.top(5) == []
    ledger.begun(range(40), chain(1, 3), 1, 16, 1.0)
    ledger.begun(range(40), chain(1, 4), 1, 16, 2.0)
    ledger.begun(range(40), chain(1, 5), 0, 16, 3.0)  # evicted meanwhile
    (prefix,) = ledger.top(5)
    assert (prefix.block_hash, prefix.num_tokens, prefix.saved_tokens) == (b"\x01", 16, 32)
    assert (prefix.num_requests, prefix.num_hits, prefix.used_at) == (4, 2, 3.0)


def test_longer_prefixes_are_their_own_and_the_top_is_by_tokens_saved() -> None:
    ledger = PrefixLedger()
    for _ in range(3):
        ledger.begun(range(100), chain(1, 2, 3, 4, 5), 4, 16, 0.0)
    ledger.begun(range(100), chain(1, 9), 1, 16, 0.0)
    assert [(prefix.num_tokens, prefix.saved_tokens) for prefix in ledger.top(2)] == [(64, 192), (16, 16)]
    assert len(ledger.top(1)) == 1


def test_the_least_recently_used_prefix_is_forgotten() -> None:
    ledger = PrefixLedger(max_prefixes=2)
    for first in (1, 2, 1, 3):
        ledger.begun(range(20), chain(first), 1, 16, 0.0)
    assert {prefix.block_hash for prefix in ledger.top(9)} == set(chain(1, 3))

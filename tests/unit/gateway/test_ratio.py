"""Ratios as people write them, and which worker is the one to change."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.messages import BlockCounts, Role, WorkerState
from gateway.planner.ratio import Ratio, choose_donor, is_settled, live, parse_ratio, ratio_of
from gateway.router import STALE_AFTER_S, ClusterView, WorkerView
from tests.support.stub_decode import record

NOW = 100.0


def worker(name: str, role: Role, *, sequences: int = 0, tokens: int = 0, held: int = 0, **more: object) -> WorkerView:
    blocks = BlockCounts(100, 100 - held, 0, held, 0)
    return WorkerView(record(name, role, blocks=blocks, **more), NOW, True, sequences, tokens)


@given(st.integers(1, 9999), st.integers(1, 9999))
def test_a_ratio_is_read_as_it_is_written(prefill: int, decode: int) -> None:
    assert parse_ratio(str(Ratio(prefill, decode))) == Ratio(prefill, decode)


@pytest.mark.parametrize("text", ["", "1", "1:", ":3", "0:3", "3:0", "-1:3", "1:3:1", "1.5:2", "one:three", "99999:1"])
def test_what_is_no_ratio_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_ratio(text)
    assert refused.value.param == "ratio"


def test_the_worker_that_has_least_to_finish_changes() -> None:
    workers = [
        worker("p0", Role.PREFILL, tokens=900),
        worker("p1", Role.PREFILL, tokens=10),
        worker("d0", Role.DECODE, sequences=1, held=50),
        worker("d1", Role.DECODE, sequences=1, held=20),
        worker("d2", Role.DECODE, state=WorkerState.DRAINING),
    ]
    readers, writers = choose_donor(workers, Role.PREFILL), choose_donor(workers, Role.DECODE)
    assert readers is not None
    assert writers is not None
    assert (readers.worker_id, writers.worker_id) == ("p1", "d1")
    assert choose_donor(workers[:2], Role.DECODE) is None
    assert ratio_of(workers) == Ratio(2, 3)
    assert is_settled(workers[:4])
    assert not is_settled(workers)


def test_a_worker_that_the_registry_has_lost_does_not_count() -> None:
    lost = WorkerView(record("d0", Role.DECODE), NOW - STALE_AFTER_S - 1, True, 0, 0)
    assert live(ClusterView([lost, worker("d1", Role.DECODE)], NOW, True)) == [worker("d1", Role.DECODE)]

"""When a further request is let in."""

import pytest

from common.errors import Overloaded
from common.messages import BlockCounts, Role, WorkerLoad
from gateway.capacity import OVERCOMMIT, Backlog, check_room, check_time
from gateway.router import ClusterView, RouterLimits, WorkerView
from tests.support.stub_decode import record

LIMITS = RouterLimits(local_prefill_tokens=64, max_prefill_wait_s=10.0, max_tick_age_s=5.0)
NOW = 100.0
BLOCK = 16


def worker(role: Role, *, queued: int = 0, tokens_per_s: float = 100.0, held: int = 0) -> WorkerView:
    load = WorkerLoad(0, 0, queued, tokens_per_s, 0.0)
    blocks = BlockCounts(100, 100 - held, 0, held, 0)
    return WorkerView(record(role.value, role, load=load, blocks=blocks), NOW, True, 0, queued)


def cluster(*workers: WorkerView) -> ClusterView:
    return ClusterView(workers, NOW, True)


def test_a_long_prompt_alone_is_served_however_long_it_takes() -> None:
    backlog = Backlog()
    check_time(cluster(worker(Role.PREFILL)), LIMITS, backlog, 5.0)
    backlog.enter(400, 8)
    check_time(cluster(worker(Role.PREFILL)), LIMITS, backlog, 5.0)


def test_prompts_that_wait_too_long_refuse_the_next_and_say_when_to_come_back() -> None:
    backlog = Backlog()
    place = backlog.enter(1500, 8)
    with pytest.raises(Overloaded) as refused:
        check_time(cluster(worker(Role.PREFILL)), LIMITS, backlog, 5.0)
    assert refused.value.retry_after_s == 10.0
    backlog.read(place)
    check_time(cluster(worker(Role.PREFILL)), LIMITS, backlog, 5.0)


def test_what_other_gateways_queued_counts_and_no_target_is_no_limit() -> None:
    busy = cluster(worker(Role.PREFILL, queued=1500))
    with pytest.raises(Overloaded):
        check_time(busy, LIMITS, Backlog(), 5.0)
    check_time(busy, LIMITS, Backlog(), 0.0)


def test_twice_the_workers_take_twice_the_prompts() -> None:
    backlog = Backlog()
    backlog.enter(900, 8)
    with pytest.raises(Overloaded):
        check_time(cluster(worker(Role.PREFILL)), LIMITS, backlog, 5.0)
    check_time(cluster(worker(Role.PREFILL), worker(Role.PREFILL)), LIMITS, backlog, 5.0)


def test_without_a_prefill_worker_the_decode_workers_rate_counts() -> None:
    backlog = Backlog()
    backlog.enter(1500, 8)
    with pytest.raises(Overloaded):
        check_time(cluster(worker(Role.DECODE)), LIMITS, backlog, 5.0)


def test_promised_growth_refuses_before_the_pool_is_full_and_an_idle_pool_takes_anything() -> None:
    view, backlog = cluster(worker(Role.DECODE)), Backlog()
    limit = int(OVERCOMMIT * 100 * BLOCK)
    check_room(view, LIMITS, backlog, 10 * limit)
    places = [backlog.enter(100, 100) for _ in range(limit // 200)]
    with pytest.raises(Overloaded):
        check_room(view, LIMITS, backlog, 200)
    for place in places:
        backlog.leave(place)
        backlog.leave(place)
    assert (backlog.promised_tokens, backlog.unread_tokens) == (0, 0)
    check_room(view, LIMITS, backlog, 200)


def test_answers_are_expected_as_long_as_they_have_been() -> None:
    backlog = Backlog()
    assert backlog.expected(10, 1000) == 138
    for _ in range(200):
        backlog.answered(500)
    assert 500 <= backlog.expected(10, 1000) <= 511
    assert backlog.expected(10, 5) == 15

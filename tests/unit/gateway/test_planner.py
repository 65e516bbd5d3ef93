"""The planner: the cheap valve first, one change at a time, never the last of a role, no flapping, home when idle."""

import itertools
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.messages import BlockCounts, Role, WorkerLoad, WorkerState
from gateway.planner.planner import (
    COOL_DOWN_FACTOR,
    IDLE_S,
    LIGHT,
    MIN_COOL_DOWN_S,
    REVERSAL_FACTOR,
    ROOM,
    Action,
    Decision,
    Planner,
    Reason,
)
from gateway.planner.pressure import MAX_VIEW_AGE_S, Pressure, Targets, look
from gateway.planner.ratio import Ratio
from gateway.planner.trend import LOOKS, MOST, WARM
from gateway.router import ClusterView, RouterLimits, WorkerView
from tests.support.stub_decode import record

BASE_TOKENS = 64
CALM = Pressure(Ratio(2, 2), True, 5, 0.3, 0.3, 0.2, 0.3, 0.0)
DECODE_HOT = replace(CALM, prefill_wait=0.0, prefill_busy=0.1, itl=1.5)
PREFILL_HOT = replace(CALM, prefill_wait=2.0, prefill_busy=1.0, itl=0.2)
IDLE = replace(CALM, num_sequences=0, prefill_wait=0.0, prefill_busy=0.0, kv_use=0.0, itl=0.0)


@dataclass
class Driver:
    """Looks once a second and carries out what is decided."""

    planner: Planner = field(default_factory=lambda: Planner(BASE_TOKENS))
    now: float = 0.0
    ratio: Ratio = field(default_factory=lambda: Ratio(2, 2))
    done: list[tuple[float, Decision]] = field(default_factory=list)

    def look(self, seen: Pressure, seconds: int = 1, *, took_s: float = 1.0) -> Decision:
        decision = None
        for _ in range(seconds):
            self.now += 1
            decision = self.planner.decide(replace(seen, ratio=self.ratio), self.now)
            if decision.action is Action.HOLD:
                continue
            self.done.append((self.now, decision))
            self.planner.begun(decision, self.now)
            if decision.role is not None:
                self.ratio = self.ratio.moved(decision.role)
                self.planner.ended(self.now, took_s, well=True)
        assert decision is not None
        return decision

    def actions(self) -> list[Action]:
        return [decision.action for _, decision in self.done]


def test_the_threshold_moves_before_a_worker_does() -> None:
    driver = Driver()
    driver.look(DECODE_HOT, 20)
    assert driver.actions()[:2] == [Action.LOCAL_TOKENS, Action.TO_DECODE]
    assert driver.done[0][1].local_prefill_tokens == 0
    assert driver.ratio == Ratio(1, 3)
    other = Driver(ratio=Ratio(1, 3))
    other.look(PREFILL_HOT, 20)
    assert other.actions()[:2] == [Action.LOCAL_TOKENS, Action.TO_PREFILL]
    assert other.done[0][1].local_prefill_tokens > BASE_TOKENS
    assert other.ratio.prefill > 1


def test_the_threshold_is_not_raised_when_the_decode_workers_could_not_read_all_of_it() -> None:
    driver = Driver()
    driver.look(PREFILL_HOT, 20)
    assert driver.actions() == [Action.TO_PREFILL]


def test_a_raised_threshold_that_was_regretted_is_not_raised_again_soon() -> None:
    driver = Driver(ratio=Ratio(1, 3))
    driver.look(PREFILL_HOT, 3)
    assert driver.actions() == [Action.LOCAL_TOKENS]
    driver.look(DECODE_HOT, 12)
    num_before = len(driver.done)
    driver.look(PREFILL_HOT, 100)
    assert Action.LOCAL_TOKENS not in driver.actions()[num_before:]


def test_a_warm_pool_is_helped_by_one_that_has_next_to_nothing_to_do_and_by_no_other() -> None:
    warm = replace(DECODE_HOT, itl=0.7)
    driver = Driver()
    driver.look(warm, 20)
    assert driver.actions() == [Action.LOCAL_TOKENS, Action.TO_DECODE]
    assert driver.done[-1][1].reason is Reason.DECODE_WARM
    other = Driver()
    other.look(replace(warm, prefill_busy=0.5), 60)
    assert other.actions() == []


def test_a_moment_of_pressure_changes_nothing() -> None:
    driver = Driver()
    driver.look(CALM, 10)
    for _ in range(2):
        driver.look(replace(CALM, prefill_wait=1.5), 1)
        driver.look(CALM, 20)
    assert driver.actions() == []


def test_two_changes_of_a_worker_are_a_cool_down_apart_which_grows_with_what_one_takes() -> None:
    for took_s in (0.5, 8.0):
        driver = Driver(ratio=Ratio(6, 2))
        driver.look(replace(DECODE_HOT, prefill_busy=0.4), 200, took_s=took_s)
        times = [at for at, decision in driver.done if decision.role is not None]
        assert len(times) >= 2
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert min(gaps) >= max(MIN_COOL_DOWN_S, COOL_DOWN_FACTOR * took_s)


def test_an_overload_that_the_other_pool_can_plainly_end_waits_for_the_least_pause_only() -> None:
    driver = Driver(ratio=Ratio(3, 1))
    driver.look(DECODE_HOT, 40, took_s=8.0)
    first, second = [at for at, decision in driver.done if decision.role is Role.DECODE]
    assert MIN_COOL_DOWN_S <= second - first < COOL_DOWN_FACTOR * 8.0


def test_a_queue_before_prefill_workers_that_rest_is_no_reason_for_more_of_them() -> None:
    driver = Driver()
    driver.look(replace(PREFILL_HOT, prefill_busy=0.1), 30)
    assert driver.actions() == []


def seconds_to_turn_back(load: Pressure) -> float:
    """Return how long after a change in favour of prefill one in favour of decode comes."""
    driver = Driver()
    driver.look(replace(PREFILL_HOT, prefill_wait=0.9), LOOKS)
    assert driver.ratio == Ratio(3, 1)
    flipped_at = next(at for at, decision in driver.done if decision.role is Role.PREFILL)
    driver.look(load, 100)
    return next(at for at, decision in driver.done if decision.role is Role.DECODE) - flipped_at


def test_turning_back_waits_longer() -> None:
    assert seconds_to_turn_back(replace(DECODE_HOT, prefill_busy=0.4)) >= REVERSAL_FACTOR * MIN_COOL_DOWN_S


def test_a_load_that_has_plainly_turned_is_followed_sooner() -> None:
    assert MIN_COOL_DOWN_S <= seconds_to_turn_back(DECODE_HOT) < REVERSAL_FACTOR * MIN_COOL_DOWN_S


def test_decode_workers_that_could_not_write_what_one_less_leaves_them_give_none() -> None:
    """A step grows faster than the number of its sequences: at 2.5 times its floor a worker does 0.6 of its most."""
    driver = Driver()
    driver.look(replace(CALM, itl=0.2), 1)
    last = driver.look(replace(PREFILL_HOT, itl=0.5), 30)
    assert driver.actions() == []
    assert (last.reason, last.donor_after) == (Reason.DONOR_TOO_BUSY, MOST)


def test_the_last_worker_of_a_role_stays() -> None:
    driver = Driver(ratio=Ratio(1, 3))
    last = driver.look(DECODE_HOT, 60)
    assert driver.actions() == [Action.LOCAL_TOKENS]
    assert (last.action, last.reason) == (Action.HOLD, Reason.LAST_OF_ITS_ROLE)


def test_a_donor_that_would_be_too_busy_afterwards_gives_nothing() -> None:
    driver = Driver()
    last = driver.look(replace(DECODE_HOT, prefill_busy=0.6), 60)
    assert driver.actions() == [Action.LOCAL_TOKENS]
    assert (last.reason, last.donor_after) == (Reason.DONOR_TOO_BUSY, pytest.approx(1.2))


def test_both_pools_hot_is_held() -> None:
    driver = Driver()
    last = driver.look(replace(PREFILL_HOT, itl=1.5), 30)
    assert driver.actions() == []
    assert last.reason is Reason.BOTH_HOT


def test_missing_metrics_hold_and_what_was_hot_before_does_not_count() -> None:
    driver = Driver()
    driver.look(DECODE_HOT, LOOKS - 1)
    last = driver.look(replace(DECODE_HOT, missing="registry"), 50)
    assert (last.action, last.reason) == (Action.HOLD, Reason.MISSING_METRICS)
    driver.look(DECODE_HOT, LOOKS - 1)
    assert driver.actions() == []


def test_an_idle_cluster_goes_home() -> None:
    driver = Driver()
    driver.look(CALM, 1)
    driver.look(DECODE_HOT, 12)
    assert (driver.ratio, driver.planner.local_prefill_tokens) == (Ratio(1, 3), 0)
    num_before = len(driver.done)
    driver.look(IDLE, int(IDLE_S) - 1)
    assert len(driver.done) == num_before
    driver.look(IDLE, 40)
    assert (driver.ratio, driver.planner.local_prefill_tokens) == (Ratio(2, 2), BASE_TOKENS)
    assert {decision.reason for _, decision in driver.done[num_before:]} == {Reason.IDLE}


def test_home_takes_no_last_worker_either() -> None:
    driver = Driver(ratio=Ratio(0, 3))
    driver.look(IDLE, 1)
    driver.ratio = Ratio(1, 2)  # an operator did that
    last = driver.look(IDLE, 100)
    assert driver.actions() == []
    assert last.reason is Reason.LAST_OF_ITS_ROLE


def test_a_steady_load_between_the_marks_moves_nothing() -> None:
    driver = Driver()
    driver.look(replace(CALM, prefill_wait=0.75, prefill_busy=0.5, itl=0.75), 300)
    assert driver.actions() == []


# ---- whatever happens ----

pressures = st.floats(0, 3)


class PlannerMachine(RuleBasedStateMachine):
    """Any load, any answer to an order, workers that come and go, metrics that are missing."""

    def __init__(self) -> None:
        super().__init__()
        self.planner = Planner(BASE_TOKENS)
        self.now = 0.0
        self.ratio = Ratio(2, 3)
        self.role: Role | None = None
        self.ended_at = float("-inf")
        self.took_s = 0.0
        self.decision: Decision | None = None

    @rule(
        waits=pressures,
        busy=st.floats(0, 1),
        kv=st.floats(0, 1),
        itl=pressures,
        admission=pressures,
        work=st.integers(0, 3),
        missing=st.sampled_from(["", "", "", "registry"]),
        settled=st.sampled_from([True, True, True, False]),
        looks=st.integers(1, 8),
    )
    def look(
        self,
        waits: float,
        busy: float,
        kv: float,
        itl: float,
        admission: float,
        work: int,
        missing: str,
        settled: bool,
        looks: int,
    ) -> None:
        for _ in range(looks):
            self.now += 1
            seen = Pressure(self.ratio, settled, work, waits, busy, kv, itl, admission, missing=missing)
            decision = self.decision = self.planner.decide(seen, self.now)
            if decision.action is Action.HOLD:
                continue
            assert not missing
            assert settled
            assert self.role is None, "a second change in flight"
            if decision.role is not None:
                is_plain = decision.reason in (Reason.PREFILL_HOT, Reason.DECODE_HOT) and decision.donor_after < LIGHT
                pause_s = MIN_COOL_DOWN_S if is_plain else max(MIN_COOL_DOWN_S, COOL_DOWN_FACTOR * self.took_s)
                assert self.now - self.ended_at >= pause_s
                assert self.ratio.moved(decision.role).prefill >= 1
                assert self.ratio.moved(decision.role).decode >= 1
                assert decision.donor_after < ROOM
            self.planner.begun(decision, self.now)
            self.role = decision.role

    @precondition(lambda self: self.role is not None)
    @rule(took_s=st.floats(0, 30), well=st.booleans())
    def end(self, took_s: float, well: bool) -> None:
        assert self.role is not None
        self.now += took_s
        if well:
            self.ratio = self.ratio.moved(self.role)
        self.planner.ended(self.now, took_s, well=well)
        self.role, self.ended_at, self.took_s = None, self.now, took_s

    @rule(prefill=st.integers(1, 4), decode=st.integers(1, 4))
    def come_and_go(self, prefill: int, decode: int) -> None:
        if self.role is None:
            self.ratio = Ratio(prefill, decode)

    @invariant()
    def threshold_is_one_of_its_rungs(self) -> None:
        assert self.planner.local_prefill_tokens in (0, BASE_TOKENS, 1024)


TestPlannerMachine = PlannerMachine.TestCase
TestPlannerMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@given(st.lists(st.tuples(st.floats(0, WARM), st.floats(0, WARM)), min_size=1, max_size=100))
def test_below_the_mark_nothing_ever_changes(looks: list[tuple[float, float]]) -> None:
    driver = Driver()
    for waits, itl in looks:
        driver.look(replace(CALM, prefill_wait=waits, itl=itl))
    assert driver.actions() == []


# ---- what is seen ----

LIMITS = RouterLimits(local_prefill_tokens=64, max_prefill_wait_s=10.0, max_tick_age_s=5.0)
TARGETS = Targets(ttft_s=2.0, itl_s=0.1)
NOW = 100.0


def worker(name: str, role: Role, *, queued: int = 0, held: int = 0, **load: float) -> WorkerView:
    fields = {"running": 0, "waiting": 0, "queued_tokens": queued, "tokens_per_s": 1000.0, "tick_age_s": 0.0} | load
    blocks = BlockCounts(100, 100 - held, 0, held, 0)
    return WorkerView(record(name, role, load=WorkerLoad(**fields), blocks=blocks), NOW, True, 0, queued)  # type: ignore[arg-type]


def test_pressures_are_measured_against_the_targets() -> None:
    view = ClusterView(
        [
            worker("p0", Role.PREFILL, queued=3000, busy=1.0),
            worker("p1", Role.PREFILL, queued=1000, busy=0.5),
            worker("d0", Role.DECODE, held=80, itl_s=0.05),
            worker("d1", Role.DECODE, held=20, itl_s=0.07, admission_wait_s=0.5),
        ],
        NOW,
        True,
    )
    seen = look(view, LIMITS, TARGETS, NOW)
    assert (seen.ratio, seen.missing, seen.is_settled) == (Ratio(2, 2), "", True)
    assert seen.prefill == pytest.approx(4000 / 2000 / 2.0)
    assert (seen.prefill_busy, seen.kv_use) == (0.75, 0.5)
    assert (seen.itl, seen.admission) == (pytest.approx(0.7), 0.25)
    assert seen.mean_itl == pytest.approx(0.6)
    assert seen.decode == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("view", "what"),
    [
        (ClusterView([worker("p0", Role.PREFILL)], NOW, False), "registry"),
        (ClusterView([worker("p0", Role.PREFILL)], NOW - MAX_VIEW_AGE_S - 1, True), "registry"),
        (ClusterView([worker("p0", Role.PREFILL, queued=10, tokens_per_s=0.0)], NOW, True), "rate"),
        (ClusterView([worker("d0", Role.DECODE, tick_age_s=60.0)], NOW, True), "progress of d0"),
    ],
)
def test_what_cannot_be_known_is_said(view: ClusterView, what: str) -> None:
    assert look(view, LIMITS, TARGETS, NOW).missing.startswith(what)


def test_a_worker_that_drains_is_not_settled() -> None:
    one = worker("p0", Role.PREFILL)
    draining = replace(one, record=record("p0", Role.PREFILL, state=WorkerState.DRAINING))
    assert not look(ClusterView([draining], NOW, True), LIMITS, TARGETS, NOW).is_settled

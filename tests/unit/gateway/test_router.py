"""The router: never a worker that cannot serve, bursts are spread, and every plan has its reason."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.messages import BlockCounts, PlanKind, Role, WorkerLoad, WorkerState
from gateway.router import (
    STALE_AFTER_S,
    ClusterView,
    PlanChoice,
    Reason,
    RouterLimits,
    WorkerView,
    choose_decode,
    choose_plan,
    usable,
)
from tests.support.stub_decode import FINGERPRINT, record

LIMITS = RouterLimits(local_prefill_tokens=64, max_prefill_wait_s=10.0, max_tick_age_s=5.0)
NOW = 1000.0


def worker(
    name: str, role: Role = Role.DECODE, *, sequences: int = 0, tokens: int = 0, seen_at: float = NOW, **changes: Any
) -> WorkerView:
    connected = changes.pop("connected", True)
    return WorkerView(record(name, role, **changes), seen_at, connected, sequences, tokens)


def view(*workers: WorkerView, redis_is_up: bool = True) -> ClusterView:
    return ClusterView(workers, NOW, redis_is_up)


def load(**changes: Any) -> WorkerLoad:
    fields: dict[str, Any] = {"running": 0, "waiting": 0, "queued_tokens": 0, "tokens_per_s": 1000.0, "tick_age_s": 0.0}
    return WorkerLoad(**(fields | changes))


def blocks(total: int, held: int) -> BlockCounts:
    return BlockCounts(total, total - held, 0, held, 0)


# ---- who may be given work ----

workers = st.builds(
    worker,
    st.sampled_from([f"w{n}" for n in range(6)]),
    st.sampled_from(Role),
    sequences=st.integers(0, 500),
    tokens=st.integers(0, 10**6),
    seen_at=st.floats(NOW - 2 * STALE_AFTER_S, NOW),
    connected=st.booleans(),
    state=st.sampled_from(WorkerState),
    load=st.builds(load, tick_age_s=st.floats(0, 10), tokens_per_s=st.floats(0, 5000)),
    blocks=st.builds(lambda total, part: blocks(total, int(total * part)), st.integers(1, 5000), st.floats(0, 1)),
)


def is_fit(one: WorkerView, role: Role) -> bool:
    return (
        one.record.role is role
        and one.record.state is WorkerState.READY
        and one.connected
        and one.record.load.tick_age_s <= LIMITS.max_tick_age_s
        and NOW - one.seen_at <= STALE_AFTER_S
    )


@given(
    st.lists(workers, max_size=8), st.integers(1, 100_000), st.floats(0, 0.999), st.sets(st.sampled_from(["w0", "w1"]))
)
def test_a_worker_that_cannot_serve_is_never_chosen(
    found: list[WorkerView], num_tokens: int, draw: float, exclude: set[Any]
) -> None:
    cluster = view(*found)
    decode = choose_decode(cluster, num_tokens, limits=LIMITS, exclude=exclude, draw=draw)
    fit = [one for one in found if is_fit(one, Role.DECODE) and one.worker_id not in exclude]
    assert (decode is None) == (not fit)
    if decode is None:
        return
    assert decode in fit
    plan = choose_plan(
        cluster, decode, num_tokens=num_tokens, cached_tokens=0, limits=LIMITS, draw=draw, exclude=exclude
    )
    assert (plan.kind is PlanKind.REMOTE) == (plan.prefill is not None) == (plan.reason is Reason.REMOTE)
    if plan.prefill is not None:
        assert is_fit(plan.prefill, Role.PREFILL)
        assert plan.prefill.worker_id not in exclude


def test_while_redis_is_away_the_last_view_counts() -> None:
    old = worker("d", seen_at=NOW - 100)
    assert usable(ClusterView((old,), NOW - 100, False), Role.DECODE, LIMITS) == [old]
    assert usable(ClusterView((old,), NOW, True), Role.DECODE, LIMITS) == []


# ---- which decode worker ----


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 8), st.lists(st.floats(0, 1), min_size=8, max_size=8), st.integers(0, 2**32))
def test_a_burst_is_spread(num_workers: int, fills: list[float], seed: int) -> None:
    """448 requests before any record changes: what was decided counts at once."""
    counts, random = [0] * num_workers, Random(seed)
    for _ in range(448):
        found = [
            worker(f"d{n}", sequences=counts[n], blocks=blocks(10_000, int(9_000 * fills[n])))
            for n in range(num_workers)
        ]
        chosen = choose_decode(view(*found), 100, limits=LIMITS, draw=random.random())
        assert chosen is not None
        counts[int(chosen.worker_id[1:])] += 1
    assert max(counts) <= 1.5 * min(counts)


def test_load_that_was_there_before_counts() -> None:
    assert choose_decode(view(worker("a", sequences=5), worker("b", sequences=4)), 10, limits=LIMITS) == worker(
        "b", sequences=4
    )


def test_of_equally_loaded_workers_the_emptier_pool_goes_first() -> None:
    full, empty = worker("a", blocks=blocks(100, 80)), worker("b", blocks=blocks(100, 10))
    assert choose_decode(view(full, empty), 16, limits=LIMITS) == empty


def test_a_worker_without_room_for_the_prompt_is_the_last_choice() -> None:
    full, busy = worker("a", blocks=blocks(100, 99)), worker("b", sequences=50)
    assert choose_decode(view(full, busy), 160, limits=LIMITS) == busy
    assert choose_decode(view(full), 160, limits=LIMITS) == full


def test_equals_are_drawn() -> None:
    cluster = view(*(worker(f"d{n}") for n in range(4)))
    chosen = Counter(
        one.worker_id for draw in range(100) if (one := choose_decode(cluster, 1, limits=LIMITS, draw=draw / 100))
    )
    assert set(chosen.values()) == {25}


# ---- who computes the prompt ----


def plan(*prefills: WorkerView, num_tokens: int = 1000, cached: int = 0, **options: Any) -> PlanChoice:
    decode = options.pop("decode", worker("d"))
    cluster = view(decode, *prefills, redis_is_up=options.pop("redis_is_up", True))
    return choose_plan(cluster, decode, num_tokens=num_tokens, cached_tokens=cached, limits=LIMITS, **options)


def prefill(name: str = "p", **changes: Any) -> WorkerView:
    return worker(name, Role.PREFILL, **changes)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (plan(prefill()), Reason.REMOTE),
        (plan(prefill(), num_tokens=65), Reason.REMOTE),
        (plan(prefill(), num_tokens=64), Reason.SHORT_PROMPT),
        (plan(prefill(), num_tokens=1), Reason.SHORT_PROMPT),
        (plan(prefill(), cached=999), Reason.CACHED),
        (plan(prefill(), cached=936), Reason.CACHED),
        (plan(prefill(), cached=935), Reason.CACHED),
        (plan(prefill(), cached=744), Reason.CACHED),
        (plan(prefill(), cached=743), Reason.REMOTE),
        (plan(), Reason.NO_PREFILL_WORKER),
        (plan(prefill(), exclude={"p"}), Reason.NO_PREFILL_WORKER),
        (plan(prefill(state=WorkerState.DRAINING)), Reason.NO_PREFILL_WORKER),
        (plan(prefill(), redis_is_up=False), Reason.REDIS_UNAVAILABLE),
        (plan(prefill(tokens=10_000)), Reason.PREFILL_BUSY),
        (plan(prefill(tokens=8_000)), Reason.REMOTE),
        (plan(prefill(tokens=10_000), decode=worker("d", tokens=20_000)), Reason.REMOTE),
    ],
)
def test_each_plan_has_its_reason(choice: PlanChoice, reason: Reason) -> None:
    assert choice.reason is reason


def test_a_prefill_worker_that_holds_another_model_is_not_used() -> None:
    other = prefill("a", fingerprint=fingerprint(model="other"))
    assert plan(other).reason is Reason.INCOMPATIBLE
    assert plan(other, prefill("b")).prefill == prefill("b")


def fingerprint(**changes: Any) -> Any:
    fields = {name: getattr(FINGERPRINT, name) for name in FINGERPRINT.__struct_fields__}
    return type(FINGERPRINT)(**(fields | changes))


def test_the_prefill_worker_that_begins_first_is_chosen() -> None:
    slow = prefill("slow", tokens=100, load=load(tokens_per_s=100.0))
    fast = prefill("fast", tokens=1000, load=load(tokens_per_s=10_000.0))
    choice = plan(slow, fast)
    assert choice.prefill == fast
    assert choice.wait_s == pytest.approx(0.2)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_prompts_are_spread_over_equal_prefill_workers(seed: int) -> None:
    pending, random = Counter({"p0": 0, "p1": 0, "p2": 0}), Random(seed)
    for _ in range(100):
        found = [prefill(name, tokens=500 * count) for name, count in pending.items()]
        choice = plan(*found, draw=random.random())
        if choice.prefill is not None:
            pending[choice.prefill.worker_id] += 1
    assert max(pending.values()) - min(pending.values()) <= 1

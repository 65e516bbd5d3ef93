"""The router and the prefix cache: holders are preferred, load still counts, and nobody is flooded."""

from collections import Counter
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.ids import WorkerId
from common.messages import PlanKind, Role, WorkerLoad, WorkerState
from gateway.router import (
    PROMPT_TOKENS,
    ClusterView,
    Reason,
    RouterLimits,
    WorkerView,
    choose_decode,
    choose_plan,
)
from tests.support.stub_decode import record

LIMITS = RouterLimits(local_prefill_tokens=64, max_prefill_wait_s=1e9, max_tick_age_s=5.0)
NOW = 1000.0
RATE, PULL_RATE = 1000.0, 20_000.0


def worker(name: str, role: Role, *, sequences: int = 0, tokens: int = 0, **changes: Any) -> WorkerView:
    load = WorkerLoad(0, 0, 0, RATE, 0.0, PULL_RATE)
    return WorkerView(record(name, role, **({"load": load} | changes)), NOW, True, sequences, tokens)


def prefill(name: str, tokens: int = 0, **changes: Any) -> WorkerView:
    return worker(name, Role.PREFILL, tokens=tokens, **changes)


def decode(name: str, sequences: int = 0, **changes: Any) -> WorkerView:
    return worker(name, Role.DECODE, sequences=sequences, **changes)


def view(*workers: WorkerView) -> ClusterView:
    return ClusterView(workers, NOW, True)


def plan(*prefills: WorkerView, num_tokens: int, cached: int = 0, **resident: int) -> Any:
    d = decode("d")
    return choose_plan(
        view(d, *prefills), d, num_tokens=num_tokens, cached_tokens=cached, limits=LIMITS, resident=resident
    )


# ---- a separate choice for decode ----


def test_a_chat_goes_back_to_the_decode_worker_that_holds_it() -> None:
    workers = view(decode("a", 1), decode("b", 0), decode("c", 0))
    assert choose_decode(workers, 1000, limits=LIMITS, resident={"a": 960}) == decode("a", 1)


def test_a_holder_with_much_more_to_do_is_left_alone() -> None:
    workers = view(decode("a", 20), decode("b", 5))
    assert choose_decode(workers, 1000, limits=LIMITS, resident={"a": 960}) == decode("b", 5)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_a_hot_prompt_and_a_burst_are_spread_over_the_decode_workers(seed: int, num_holders: int) -> None:
    """448 at once, all for a prompt that only some hold; what was decided counts at once."""
    counts, random = Counter({f"d{n}": 0 for n in range(4)}), Random(seed)
    resident = {WorkerId(f"d{n}"): 1500 for n in range(num_holders)}
    for _ in range(448):
        found = view(*(decode(name, count) for name, count in counts.items()))
        chosen = choose_decode(found, 1550, limits=LIMITS, resident=resident, draw=random.random())
        assert chosen is not None
        counts[chosen.worker_id] += 1
    assert max(counts.values()) <= 1.5 * min(counts.values())


# ---- who computes the prompt ----


def test_the_short_new_part_of_a_chat_is_computed_where_the_chat_is_held() -> None:
    choice = plan(prefill("p"), num_tokens=1150, cached=1000)
    assert (choice.kind, choice.reason) == (PlanKind.LOCAL, Reason.CACHED)
    assert choice.work_tokens == 150


def test_a_long_new_part_goes_to_a_prefill_worker_which_may_pull_the_history() -> None:
    choice = plan(prefill("p"), num_tokens=3000, cached=1008, d=1008)
    assert choice.kind is PlanKind.REMOTE
    assert choice.peer is not None
    assert (choice.peer.worker_id, choice.peer.role, choice.peer.num_tokens) == ("d", Role.DECODE, 1008)
    assert PROMPT_TOKENS + 1992 < choice.work_tokens < PROMPT_TOKENS + 2100


def test_a_busy_decode_worker_leaves_its_turn_to_an_idle_prefill_worker_that_holds_as_much() -> None:
    busy = decode("d", sequences=32)
    choice = choose_plan(
        view(busy, prefill("p")),
        busy,
        num_tokens=1150,
        cached_tokens=1000,
        limits=LIMITS,
        resident={WorkerId("p"): 1000},
    )
    assert choice.reason is Reason.REMOTE


def test_the_holder_is_chosen_until_its_queue_outweighs_what_it_saves() -> None:
    assert plan(prefill("a"), prefill("b"), num_tokens=2000, b=1600).prefill.worker_id == "b"
    assert plan(prefill("a"), prefill("b", 5000), num_tokens=2000, b=1600).prefill.worker_id == "a"


def test_a_worker_does_not_pull_when_computing_is_faster() -> None:
    slow = WorkerLoad(0, 0, 0, RATE, 0.0, pull_tokens_per_s=RATE / 2)
    assert plan(prefill("a", load=slow), num_tokens=2000, gone=1600).peer is None
    assert plan(prefill("a", load=slow), num_tokens=2000, d=1600).peer is None
    assert plan(prefill("a"), num_tokens=2000, d=1600).peer.worker_id == "d"


@pytest.mark.parametrize(
    "changes", [{"state": WorkerState.DRAINING}, {"load": WorkerLoad(1, 0, 0, RATE, 99.0)}], ids=["draining", "stuck"]
)
def test_nothing_is_pulled_from_or_sent_to_a_worker_that_cannot_serve(changes: dict[str, Any]) -> None:
    choice = plan(prefill("a"), prefill("b", **changes), num_tokens=2000, b=1600)
    assert choice.prefill.worker_id == "a"
    assert choice.peer is None


def test_an_entry_of_a_worker_that_is_gone_moves_nothing() -> None:
    choice = plan(prefill("a"), prefill("b", 10), num_tokens=2000, dead=2000)
    assert choice.prefill.worker_id == "a"
    assert choice.peer is None


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_a_hot_prompt_keeps_four_prefill_workers_equally_busy(seed: int) -> None:
    """One worker has computed it; whoever serves it next holds it too. Workers drain their queues meanwhile."""
    random = Random(seed)
    names = [f"p{n}" for n in range(4)]
    pending, served = dict.fromkeys(names, 0), Counter(dict.fromkeys(names, 0))
    resident = {WorkerId("p0"): 1504}
    for at in range(448):
        found = [prefill(name, pending[name]) for name in names]
        d = decode("d")
        choice = choose_plan(
            view(d, *found),
            d,
            num_tokens=1700,
            cached_tokens=0,
            limits=LIMITS,
            resident=resident,
            draw=random.random(),
        )
        assert choice.prefill is not None
        name = choice.prefill.worker_id
        served[name] += 1
        pending[name] += choice.work_tokens
        resident[name] = 1504
        if at % 4 == 0:  # the cluster is a little slower than what arrives
            pending = {key: max(0, value - 200) for key, value in pending.items()}
    assert max(served.values()) <= 1.5 * min(served.values())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32))
def test_a_burst_for_a_prompt_that_one_prefill_worker_holds_is_spread(seed: int) -> None:
    """448 decided before any cache changes."""
    random, pending, served = Random(seed), Counter({f"p{n}": 0 for n in range(4)}), Counter[str]()
    for _ in range(448):
        d = decode("d")
        choice = choose_plan(
            view(d, *(prefill(name, tokens) for name, tokens in pending.items())),
            d,
            num_tokens=1550,
            cached_tokens=0,
            limits=LIMITS,
            resident={WorkerId("p0"): 1504},
            draw=random.random(),
        )
        assert choice.prefill is not None
        pending[choice.prefill.worker_id] += choice.work_tokens
        served[choice.prefill.worker_id] += 1
    assert max(pending.values()) <= 1.5 * min(pending.values())
    assert len(served) == 4

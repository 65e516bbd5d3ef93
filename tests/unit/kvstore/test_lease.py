"""Leases on a virtual clock."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.ids import BlockId, TransferId
from kvstore.lease import LeaseTable

A, B, C = TransferId("a"), TransferId("b"), TransferId("c")


def test_a_lease_must_last():
    with pytest.raises(ValueError, match="longer than 0"):
        LeaseTable(0)


def test_a_lease_runs_out_and_stays_until_it_is_released():
    leases = LeaseTable(30)
    leases.grant(A, [BlockId(1), BlockId(2)], now=100)
    assert leases.expired(129.9) == []
    assert leases.expired(130) == [A]
    assert leases.holders() == [(1, 2)]
    assert leases.release(A, None)
    assert leases.expired(1000) == []
    assert leases.holders() == []


def test_renewal_counts_from_now_and_names_the_unknown():
    leases = LeaseTable(30)
    leases.grant(A, [], now=0)
    leases.grant(B, [], now=0)
    assert leases.renew([A, C], now=20) == (C,)
    assert leases.expired(30) == [B]
    assert leases.expired(50) == [B, A]


def test_a_lease_that_ran_out_can_still_be_renewed_before_it_is_reaped():
    leases = LeaseTable(30)
    leases.grant(A, [], now=0)
    assert leases.renew([A], now=40) == ()
    assert leases.expired(40) == []


def test_release_is_idempotent_and_minds_the_generation():
    leases = LeaseTable(30)
    first = leases.grant(A, [], now=0)
    assert leases.release(A, first)
    assert not leases.release(A, first)
    second = leases.grant(A, [], now=1)
    assert second != first
    assert not leases.release(A, first)  # a late Done of the first
    assert A in leases
    assert leases.release(A, second)
    assert not leases.release(C, None)


def test_a_transfer_has_one_lease_at_a_time():
    leases = LeaseTable(30)
    leases.grant(A, [], now=0)
    with pytest.raises(ValueError, match="already has a lease"):
        leases.grant(A, [], now=1)


def test_a_clock_that_steps_back_shortens_nothing():
    leases = LeaseTable(30)
    leases.grant(A, [], now=100)
    leases.grant(B, [], now=50)
    assert leases.expired(129) == []
    assert leases.expired(130) == [A, B]
    leases.release(A, None)
    assert leases.expired(129) == []
    assert leases.expired(130) == [B]


class LeaseMachine(RuleBasedStateMachine):
    """Against a plain dictionary of expiry times."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = LeaseTable(10)
        self.now = 0.0
        self.model: dict[TransferId, tuple[int, float]] = {}

    @rule(step=st.floats(0, 8))
    def time_passes(self, step: float) -> None:
        self.now += step

    @rule(number=st.integers(0, 5))
    def grant(self, number: int) -> None:
        transfer_id = TransferId(str(number))
        if transfer_id not in self.model:
            generation = self.leases.grant(transfer_id, [BlockId(number)], self.now)
            assert all(generation != other for other, _ in self.model.values())
            self.model[transfer_id] = (generation, self.now + 10)

    @rule(numbers=st.lists(st.integers(0, 5)))
    def renew(self, numbers: list[int]) -> None:
        transfer_ids = [TransferId(str(number)) for number in numbers]
        unknown = self.leases.renew(transfer_ids, self.now)
        assert list(unknown) == [transfer_id for transfer_id in transfer_ids if transfer_id not in self.model]
        for transfer_id in set(transfer_ids) & self.model.keys():
            self.model[transfer_id] = (self.model[transfer_id][0], self.now + 10)

    @rule(number=st.integers(0, 5), off=st.sampled_from([None, 0, 1]))
    def release(self, number: int, off: int | None) -> None:
        transfer_id = TransferId(str(number))
        known = self.model.get(transfer_id)
        generation = None if off is None else (known[0] if known else 0) + off
        released = self.leases.release(transfer_id, generation)
        assert released == (known is not None and off != 1)
        if released:
            del self.model[transfer_id]

    @rule()
    def reap(self) -> None:
        for transfer_id in self.leases.expired(self.now):
            assert self.leases.release(transfer_id, None)
            del self.model[transfer_id]

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert len(self.leases) == len(self.model)
        due = {transfer_id for transfer_id, (_, expires_at) in self.model.items() if expires_at <= self.now}
        assert set(self.leases.expired(self.now)) == due
        assert sorted(self.leases.holders()) == sorted((int(transfer_id),) for transfer_id in self.model)


TestLeaseMachine = LeaseMachine.TestCase
TestLeaseMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

"""Counting a worker's load: what was given counts at once, what others gave counts with the next record."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.tally import Tally


def test_what_was_given_counts_at_once() -> None:
    tally = Tally()
    tally.add(3)
    assert tally.total == 3
    tally.remove(1)
    assert tally.total == 2


def test_what_was_given_is_not_counted_twice() -> None:
    tally = Tally()
    tally.add(3)
    tally.observed(3)
    assert tally.total == 3


def test_what_others_gave_counts_too() -> None:
    tally = Tally()
    tally.add(3)
    tally.observed(10)
    assert tally.total == 10
    tally.add(1)
    assert tally.total == 11


def test_a_record_that_is_older_than_the_end_of_our_work_makes_up_nothing() -> None:
    tally = Tally()
    tally.add(5)
    tally.remove(5)
    tally.observed(5)  # as it was a moment ago
    assert tally.total == 0
    tally.observed(0)
    assert tally.total == 0


@given(st.lists(st.one_of(st.integers(-5, 5), st.tuples(st.integers(0, 20))), max_size=30))
def test_it_is_never_below_our_own_work(events: list[int | tuple[int]]) -> None:
    tally, own = Tally(), 0
    for event in events:
        if isinstance(event, tuple):
            tally.observed(event[0])
        elif event >= 0:
            tally.add(event)
            own += event
        else:
            amount = min(own, -event)
            tally.remove(amount)
            own -= amount
        assert tally.total >= own

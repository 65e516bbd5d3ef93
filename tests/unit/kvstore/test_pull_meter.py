"""A fetch is made when what was measured says that it beats computing."""

from kvstore.pull_meter import TRIED_AGAIN, PullMeter


def measured(borrow_s: float, tokens_per_s: float) -> PullMeter:
    meter = PullMeter()
    meter.borrowed(borrow_s)
    meter.pulled(int(tokens_per_s), 1.0)
    return meter


def test_what_is_not_measured_yet_is_tried():
    assert PullMeter().is_cheaper(16, 1000.0)
    assert measured(0.1, 10.0).is_cheaper(16, 0.0)


def test_the_faster_way_is_taken_and_the_fixed_cost_counts():
    meter = measured(0.1, 10_000.0)
    assert meter.is_cheaper(1000, 1000.0)  # 0.2 s against 1 s
    assert not meter.is_cheaper(64, 1000.0)  # 0.1064 s against 0.064 s
    assert not meter.is_cheaper(10_000, 20_000.0)


def test_a_link_that_got_slow_is_left_and_one_failed_pull_does_not_end_it():
    meter = measured(0.001, 10_000.0)
    meter.pulled(0, 2.0)
    assert meter.is_cheaper(1000, 1000.0)
    for _ in range(20):
        meter.pulled(0, 2.0)
    assert not meter.is_cheaper(1000, 1000.0)


def test_one_of_many_that_look_too_slow_is_tried_so_that_a_bad_moment_is_not_remembered_for_ever():
    meter = measured(borrow_s=0.01, tokens_per_s=10.0)
    tried = [meter.is_cheaper(100, 1000.0) for _ in range(2 * TRIED_AGAIN)]
    assert tried.count(True) == 2
    assert not any(tried[: TRIED_AGAIN - 1])
    for _ in range(40):
        meter.pulled(1000, 0.01)
    assert all(meter.is_cheaper(100, 1000.0) for _ in range(2 * TRIED_AGAIN))

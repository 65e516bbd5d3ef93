"""When a dead child is started again."""

from common.cli import EXIT_BAD_CONFIG
from compose.restart_policy import FIRST_DELAY_S, MAX_DELAY_S, MAX_EARLY_DEATHS, STABLE_S, RestartPolicy


def test_waits_double_up_to_a_limit() -> None:
    policy = RestartPolicy()
    delays = [policy.delay_s(1, 0.1, was_ready=True) for _ in range(40)]
    assert delays[:3] == [FIRST_DELAY_S, 2 * FIRST_DELAY_S, 4 * FIRST_DELAY_S]
    assert delays[-1] == MAX_DELAY_S


def test_a_long_life_begins_the_count_anew() -> None:
    policy = RestartPolicy()
    for _ in range(5):
        policy.delay_s(1, 0.1, was_ready=True)
    assert policy.delay_s(-9, STABLE_S, was_ready=True) == FIRST_DELAY_S


def test_deaths_in_a_row_before_the_cluster_was_ready_end_the_attempt() -> None:
    policy = RestartPolicy()
    delays = [policy.delay_s(1, 1.0, was_ready=False) for _ in range(MAX_EARLY_DEATHS)]
    assert None not in delays[:-1]
    assert delays[-1] is None


def test_bad_options_are_not_tried_again_at_start() -> None:
    assert RestartPolicy().delay_s(EXIT_BAD_CONFIG, 1.0, was_ready=False) is None


def test_once_ready_nothing_is_given_up() -> None:
    policy = RestartPolicy()
    assert all(policy.delay_s(EXIT_BAD_CONFIG, 0.0, was_ready=True) is not None for _ in range(100))

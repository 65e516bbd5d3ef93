"""The step meter: what a rate is taken from."""

import pytest

from kvstore.host.meter import StepMeter


def run_steps(meter: StepMeter, *steps: tuple[int, float]) -> None:
    now = 0.0
    for num_prompt_tokens, seconds in steps:
        meter.begin(now, num_prompt_tokens)
        now += seconds
        meter.end(now, num_prompt_tokens)


def test_tiny_prompts_do_not_drag_the_rate_down():
    meter = StepMeter()
    run_steps(meter, (512, 1.0), *[(2, 0.1)] * 20)
    assert meter.prompt_tokens_per_s > 0.9 * 512


def test_nothing_is_measured_from_decoding_or_a_few_tokens():
    meter = StepMeter()
    run_steps(meter, (0, 0.1), (2, 0.1), (31, 0.1))
    assert meter.prompt_tokens_per_s == 0.0


def test_the_rate_follows_large_steps():
    meter = StepMeter()
    run_steps(meter, (512, 1.0), *[(512, 2.0)] * 8)
    assert abs(meter.prompt_tokens_per_s - 256) < 10


def test_the_tick_age_grows_only_while_there_is_work():
    meter = StepMeter(prompt_tokens_per_s=400.0)
    meter.begin(1.0, 1)
    assert meter.tick_age_s(5.0) == pytest.approx(3.99)
    meter.idle()
    assert meter.tick_age_s(9.0) == 0.0


def test_a_step_that_is_as_slow_as_its_size_and_rate_say_is_not_overdue():
    meter = StepMeter()
    run_steps(meter, *[(512, 15.0)] * 3)  # a large model, or a busy machine
    meter.begin(100.0, 512)
    assert meter.tick_age_s(100.0 + 3 * 15.0) == 0.0
    assert meter.tick_age_s(100.0 + 5 * 15.0) == pytest.approx(15.0)


def test_a_step_of_one_token_is_overdue_soon_whatever_prompts_may_take():
    meter = StepMeter()
    run_steps(meter, *[(512, 15.0)] * 3)
    meter.begin(100.0, 1)
    assert meter.tick_age_s(111.0) > 10.0


def test_the_first_prompt_of_all_has_time_before_a_rate_is_known():
    meter = StepMeter()
    meter.begin(1.0, 512)
    assert meter.tick_age_s(41.0) == 0.0
    assert meter.tick_age_s(70.0) > 10.0


def test_between_two_steps_nothing_is_allowed():
    meter = StepMeter()
    run_steps(meter, (512, 15.0))
    assert meter.tick_age_s(20.0) == 5.0


def test_how_busy_it_is_follows_the_last_seconds() -> None:
    meter = StepMeter()
    now = 0.0
    for _ in range(300):  # half of the time
        meter.begin(now, 10)
        meter.end(now + 0.05, 10)
        now += 0.1
    assert meter.busy(now) == pytest.approx(0.5, abs=0.05)
    assert meter.busy(now + 30) < 0.01
    meter.begin(now + 30, 10)
    assert meter.busy(now + 60) > 0.99  # a step that does not end is no rest


def test_the_time_between_tokens_is_that_of_steps_that_decode_and_nothing_when_idle() -> None:
    meter = StepMeter()
    for number in range(50):
        meter.begin(number * 0.2, 1)
        meter.end(number * 0.2 + 0.1, 0, decodes=True)
    assert meter.itl_s == pytest.approx(0.2)
    meter.idle()
    assert meter.itl_s == 0.0
    meter.begin(100.0, 1)
    meter.end(100.1, 0, decodes=True)
    assert meter.itl_s == 0.0  # the gap since then was nobody's

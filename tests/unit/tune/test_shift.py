"""What the benchmark of a load that turns makes of its runs."""

from dataclasses import dataclass

import pytest

from benchmarks.ratio.shift import Run, verdict


@dataclass(frozen=True)
class Case:
    good: list[int]
    failed: int
    turns: int
    holds: bool


def run(name: str, good: list[int], failed: int = 0, turns: int = 0) -> Run:
    return Run(name, [100, 100], good, failed, [], [], [], [], 0.0, 0.0, [], turns)


@pytest.mark.parametrize(
    "case",
    [
        Case([95, 95], 0, 1, True),
        Case([100, 94], 0, 1, False),
        Case([100, 100], 1, 1, False),
        Case([100, 100], 0, 2, False),
    ],
)
def test_the_planner_has_to_be_close_to_the_best_of_each_phase_and_neither_fail_nor_flap(case: Case) -> None:
    fixed = [run("1:3", [10, 100]), run("3:1", [100, 5], failed=3)]
    assert verdict([*fixed, run("auto", case.good, case.failed, case.turns)])[1] is case.holds

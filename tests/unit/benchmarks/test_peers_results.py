"""Results of several rounds: medians, ratios, what is refused, and a run that was broken off."""

from pathlib import Path

import pytest

from benchmarks.peers.budget import FULL, QUICK
from benchmarks.peers.goals import verdicts
from benchmarks.peers.measurement import END, Measurement, ResultFile, Settings
from benchmarks.peers.names import BATON_SPLIT, LLAMA_1T, VLLM, chats_name, decode_name, steady_name
from benchmarks.peers.report import markdown
from benchmarks.peers.results import Key, Results
from benchmarks.peers.rounds import turned
from common.errors import ConfigError

SETTINGS = Settings("2026-11-30", "a machine", "a command", QUICK)
BUSY = ["the load generator used 97 % of a core: it was the bottleneck"]


def rate(number: int, engine: str, value: float, warnings: list[str] | None = None) -> Measurement:
    return Measurement(number, engine, decode_name(1), {"tokens_per_s": value}, warnings or [])


def key(engine: str) -> Key:
    return Key(engine, decode_name(1))


def test_a_ratio_is_the_median_of_the_ratios_inside_each_round() -> None:
    ours = [rate(0, "a", 10.0), rate(1, "a", 100.0), rate(2, "a", 30.0)]
    theirs = [rate(0, "b", 5.0), rate(1, "b", 20.0), rate(2, "b", 30.0)]
    results = Results(ours + theirs)
    assert results.ratio(key("a"), key("b")).value == 2.0  # of 2, 5 and 1
    assert results.median(key("a")).value == 30.0


def test_a_ratio_is_refused_where_the_client_was_the_bottleneck() -> None:
    results = Results([rate(0, "a", 10.0, BUSY), rate(1, "a", 10.0, BUSY), rate(2, "a", 10.0), rate(2, "b", 5.0)])
    found = results.ratio(key("a"), key("b"))
    assert found.value is None
    assert "97 % of a core" in found.why


def test_one_round_of_a_late_client_among_several_is_left_out() -> None:
    results = Results([rate(0, "a", 999.0, BUSY), rate(1, "a", 10.0), rate(2, "a", 12.0)])
    assert results.median(key("a")).value == 11.0


def test_an_engine_that_did_not_start_says_why_for_all_its_workloads() -> None:
    results = Results([Measurement(0, "b", "start", error="not installed: no wheel"), rate(0, "a", 1.0)])
    assert results.ratio(key("a"), key("b")).why == "not measured: not installed: no wheel"


def test_the_best_of_several_is_the_one_with_the_largest_median() -> None:
    results = Results([rate(0, "a", 1.0), rate(0, "b", 2.0)])
    assert results.best([key("a"), key("b"), key("c")]) == key("b")
    assert results.best([key("c")]) is None


def test_goals_are_met_missed_or_without_a_figure() -> None:
    measurements = [rate(0, BATON_SPLIT, 80.0), rate(0, LLAMA_1T, 70.0)]
    measurements += [
        Measurement(0, engine, steady_name(injected), {"itl_p99_ms": value})
        for engine, injected, value in (
            (BATON_SPLIT, False, 20.0),
            (BATON_SPLIT, True, 40.0),
            (VLLM, False, 40.0),
            (VLLM, True, 4000.0),
        )
    ]
    shares = {BATON_SPLIT: 1.0, VLLM: 0.25}
    measurements += [
        Measurement(0, engine, chats_name(1.0, True), {"good_share": share}) for engine, share in shares.items()
    ]
    found = {one.work: one for one in verdicts(Results(measurements), QUICK)}
    decode, missing, *_ = [one for work, one in found.items() if work.startswith("decode x 1,")]
    assert (decode.figure, decode.met) == ("1.14 x", True)
    assert (missing.figure, missing.met) == ("not measured", None)
    stall = found["ITL p99 of 4 chats, with long prompts / without"]
    assert (stall.figure, stall.met) == ("2.00 x (vLLM: 100.0 x)", False)
    most, highest = [one for work, one in found.items() if work.startswith("goodput")]
    assert (most.figure, most.met) == ("1.00/s against 0.25/s: 4.00 x", True)
    assert (highest.figure, highest.met) == ("1.00/s against 0.00/s: no ratio, vLLM has none", True)


def test_a_run_is_continued_after_the_last_complete_part(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first = ResultFile.open(path, SETTINGS)
    first.add(rate(0, "a", 1.0))
    first.add(Measurement(0, "a", END))
    first.add(rate(0, "b", 2.0))
    with path.open("ab") as file:
        file.write(b'{"round":0,"eng')  # a crash in the middle of a line
    again = ResultFile.open(path, SETTINGS)
    assert again.has(0, "a")
    assert not again.has(0, "b")
    assert again.measurements == [rate(0, "a", 1.0), Measurement(0, "a", END)]
    assert ResultFile.open(path, SETTINGS).measurements == again.measurements


def test_a_file_of_another_budget_is_not_continued(tmp_path: Path) -> None:
    ResultFile.open(tmp_path / "results.jsonl", SETTINGS)
    with pytest.raises(ConfigError, match="measured with other options"):
        ResultFile.open(tmp_path / "results.jsonl", Settings("2026-12-01", "a machine", "a command", FULL))


def test_every_engine_begins_a_round_in_its_turn() -> None:
    assert [turned("abc", by) for by in range(4)] == [list("abc"), list("bca"), list("cab"), list("abc")]


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    assert markdown(["engine", "rate"], [["x", "1.5"], ["y", "-"]]).splitlines()[1] == "| --- | ---: |"

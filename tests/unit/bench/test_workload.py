"""What is sent when: from a seed, at the rate that was asked for."""

import json
import random
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError
from compose.bench.config import BenchServeConfig, parse_goals
from compose.bench.workload import LOWEST_ID, make_jobs, make_warmups, send_times


def config(**options: Any) -> BenchServeConfig:
    return BenchServeConfig(**{"num_prompts": 40, "input_len": 32} | options)


def test_a_seed_sends_the_same_requests_at_the_same_times() -> None:
    options = config(request_rate=5.0, range_ratio=0.5)
    assert make_jobs(options) == make_jobs(options)
    assert make_jobs(options) != make_jobs(config(request_rate=5.0, range_ratio=0.5, seed=1))


def test_warm_ups_are_other_prompts() -> None:
    options = config(num_warmups=3)
    warmups = {job.prompt for job in make_warmups(options)}
    assert len(warmups) == 3
    assert not warmups & {job.prompt for job in make_jobs(options)}


@given(st.integers(1, 200), st.floats(0.1, 1000), st.floats(0.05, 50), st.integers(0, 99))
def test_requests_come_in_order_within_the_time_that_their_rate_takes(
    count: int, rate: float, burstiness: float, seed: int
) -> None:
    times = send_times(count, rate, burstiness, random.Random(seed))
    assert len(times) == count
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] <= count / rate * (1 + 1e-9)


def test_without_a_rate_all_are_due_at_once() -> None:
    assert send_times(5, inf, 1.0, random.Random(0)) == [0.0] * 5


@pytest.mark.parametrize(("burstiness", "spread"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_burstiness_spreads_the_gaps(burstiness: float, spread: float) -> None:
    times = send_times(20_000, 10.0, burstiness, random.Random(1))
    gaps = [later - at for at, later in pairwise(times)]
    assert fmean(gaps) == pytest.approx(0.1, rel=0.01)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(spread, rel=0.1)


def test_lengths_lie_around_what_was_asked_for() -> None:
    jobs = make_jobs(config(num_prompts=300, input_len=100, output_len=20, range_ratio=0.25))
    assert {min(len(job.prompt) for job in jobs), max(len(job.prompt) for job in jobs)} == {75, 125}
    assert {min(job.output_len for job in jobs), max(job.output_len for job in jobs)} == {15, 25}
    assert all(LOWEST_ID <= token_id < 8192 for job in jobs for token_id in job.prompt)


def test_prefixes_are_shared() -> None:
    jobs = make_jobs(config(dataset="prefix", num_prefixes=3, prefix_len=64, input_len=8))
    assert {len(job.prompt) for job in jobs} == {72}
    assert len({job.prompt[:64] for job in jobs}) == 3
    assert len({job.prompt for job in jobs}) == 40


def trace(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_trace_keeps_its_lengths_times_and_sharing(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 1000, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 3000, "input_length": 900, "output_length": 7, "hash_ids": [1, 3]},
    ]
    options = config(dataset="trace", trace=trace(tmp_path / "trace.jsonl", rows))
    first, second = make_jobs(options)
    assert [first.at_s, second.at_s] == [0.0, 2.0]
    assert [len(first.prompt), len(second.prompt)] == [700, 900]
    assert [first.output_len, second.output_len] == [5, 7]
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:700]
    assert all(LOWEST_ID <= token_id < options.vocab_size for token_id in first.prompt)


def test_a_rate_squeezes_a_trace(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * at, "input_length": 9, "output_length": 1, "hash_ids": [at]} for at in range(5)]
    jobs = make_jobs(config(dataset="trace", trace=trace(tmp_path / "trace.jsonl", rows), request_rate=10.0))
    assert [job.at_s for job in jobs] == pytest.approx([0.0, 0.125, 0.25, 0.375, 0.5])


def test_a_chat_writes_a_word_for_each_token() -> None:
    (job,) = make_jobs(config(num_prompts=1))
    assert len(job.text().split()) == 32


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"num_prompts": 0}, "--num-prompts"),
        ({"request_rate": 0.0}, "--request-rate"),
        ({"burstiness": -1.0}, "--burstiness"),
        ({"max_concurrency": -1}, "--max-concurrency"),
        ({"range_ratio": 1.0}, "--range-ratio"),
        ({"vocab_size": 10}, "--vocab-size"),
        ({"percentiles": (0.0,)}, "--percentiles"),
        ({"dataset": "trace"}, "--trace"),
        ({"goodput": ("ttft",)}, "--goodput"),
        ({"goodput": ("speed:3",)}, "--goodput"),
        ({"goodput": ("ttft:0",)}, "--goodput"),
    ],
)
def test_what_cannot_work_is_said_with_the_flag(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        config(**options)


def test_goals_are_milliseconds_by_metric() -> None:
    assert parse_goals(("ttft:500", "tpot:49.5")) == {"ttft": 500.0, "tpot": 49.5}

"""Loads: made from a rate, or read from the three forms of traces."""

from pathlib import Path

import pytest

from common.errors import ConfigError
from compose.tune.trace import ID_TOKENS, Arrival, poisson, read_trace, scaled
from compose.tune.tune import parse_seconds

MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2353]}
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,Conversation log
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MOONCAKE, [Arrival(0.0, 6955, 52, (46, 47, 48)), Arrival(3.053, 6472, 26, (46, 47, 2353))]),
        (BURST_GPT, [Arrival(0.0, 472, 18), Arrival(40.0, 1087, 230)]),
        (AZURE, [Arrival(0.0, 374, 44), Arrival(4.314579, 396, 109)]),
    ],
    ids=["mooncake", "burst_gpt", "azure"],
)
def test_each_form_is_read(text: str, expected: list[Arrival], tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    found = read_trace(tmp_path / "trace", limit=10)
    assert [(one.prompt_tokens, one.answer_tokens, one.hash_ids) for one in found] == [
        (one.prompt_tokens, one.answer_tokens, one.hash_ids) for one in expected
    ]
    assert [one.at_s for one in found] == pytest.approx([one.at_s for one in expected], abs=1e-5)
    assert len(read_trace(tmp_path / "trace", limit=1)) == 1


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", '{"timestamp": 1}\n', AZURE.splitlines()[0] + "\nx,1,1\n"])
def test_what_is_no_trace_is_said(text: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(ConfigError, match="--trace"):
        read_trace(tmp_path / "trace", limit=10)
    with pytest.raises(ConfigError, match="--trace"):
        read_trace(tmp_path / "missing", limit=10)


def test_equal_leading_hash_ids_are_an_equal_prefix_and_no_more() -> None:
    one = Arrival(0.0, 2 * ID_TOKENS + 100, 1, (7, 8)).token_ids(1)
    two = Arrival(0.0, 2 * ID_TOKENS + 100, 1, (7, 9)).token_ids(2)
    assert len(one) == len(two) == 2 * ID_TOKENS + 100
    assert one[:ID_TOKENS] == two[:ID_TOKENS]
    assert one[ID_TOKENS] != two[ID_TOKENS]
    assert one[-100:] != two[-100:]
    assert Arrival(0.0, 300, 1).token_ids(1) != Arrival(0.0, 300, 1).token_ids(2)


def test_a_rate_is_kept_and_a_trace_can_be_brought_to_one() -> None:
    made = poisson(isl=10, osl=5, rate=4.0, seconds=500)
    assert len(made) == pytest.approx(2000, rel=0.1)
    assert made == poisson(isl=10, osl=5, rate=4.0, seconds=500)
    slow = scaled(made, 1.0)
    assert slow[-1].at_s == pytest.approx(len(made))


@pytest.mark.parametrize(("text", "seconds"), [("150ms", 0.15), ("2s", 2.0), ("2", 2.0), ("1m", 60.0), (" 0.5s ", 0.5)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert parse_seconds(text, "--ttft") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1s", "0", "5h", "nan"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--ttft"):
        parse_seconds(text, "--ttft")

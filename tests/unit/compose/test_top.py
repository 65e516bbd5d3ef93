"""What ``baton top`` draws."""

import pytest
from rich.console import Console

from common.errors import ConfigError
from common.messages import BlockCounts
from compose.top import BAR_WIDTH, Look, TopCluster, TopConfig, TopWorker, bar, screen, token_counts


def worker(name: str, state: str = "ready") -> TopWorker:
    blocks = BlockCounts(total=100, free=25, cached=25, held=50, quarantined=0)
    return TopWorker(name, name.partition("-")[0], state, 3, 2, 0.0, 0.031, blocks)


def drawn(before: Look, now: Look) -> str:
    console = Console(width=140, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(screen(before, now))
    return capture.get()


def test_rates_are_those_between_two_looks() -> None:
    cluster = TopCluster((worker("decode-0"), worker("prefill-0"), worker("decode-1", "draining")), "up")
    before = Look(cluster, {"prompt": 100.0, "answer": 10.0}, at_s=5.0)
    shown = drawn(before, Look(cluster, {"prompt": 300.0, "answer": 20.0}, at_s=7.0))
    assert "1 prefill, 1 decode, 9 running, 6 waiting, 100 prompt tokens/s, 5 answer tokens/s" in shown
    names = [line.split()[0] for line in shown.splitlines() if "-" in line and line.strip()[:1].isalpha()]
    assert names == ["prefill-0", "decode-0", "decode-1"]
    assert "50/100" in shown
    assert "3.1 %" in shown


def test_one_look_has_no_rates_and_a_lost_redis_is_said() -> None:
    look = Look(TopCluster((), "down"), {"prompt": 1.0, "answer": 1.0}, at_s=5.0)
    shown = drawn(look, look)
    assert "tokens/s" not in shown
    assert "Redis is down" in shown


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (BlockCounts(100, 100, 0, 0, 0), (0, 0)),
        (BlockCounts(100, 25, 25, 40, 10), (12, 6)),
        (BlockCounts(3, 0, 0, 3, 0), (24, 0)),
        (BlockCounts(48, 0, 47, 1, 0), (0, 24)),
        (BlockCounts(0, 0, 0, 0, 0), (0, 0)),
    ],
)
def test_the_bar_is_always_full_width(blocks: BlockCounts, expected: tuple[int, int]) -> None:
    text = bar(blocks).plain
    assert len(text) == BAR_WIDTH
    assert (text.count("█"), text.count("▒")) == expected


def test_counts_are_read_from_a_page() -> None:
    page = (
        "# HELP x\nbaton_prompt_tokens_total 12.0\nbaton_generation_tokens_total 3.5e2\nvllm:prompt_tokens_total 9.0\n"
    )
    assert token_counts(page) == {"prompt": 12.0, "answer": 350.0}
    assert token_counts("") == {"prompt": 0.0, "answer": 0.0}


def test_a_pause_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="--every"):
        TopConfig(every=0)

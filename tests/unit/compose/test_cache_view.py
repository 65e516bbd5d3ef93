"""``baton cache``: what the tables say of workers and their roles, and of shared prefixes."""

from io import StringIO

from rich.console import Console

from compose.cache_view import stats_table, top_table


def counts(queries: int) -> dict[str, object]:
    return {
        "queries_tokens": queries,
        "hit_tokens": 0,
        "hit_rate": 0.0,
        "by_source": {"local": 0, "peer": 0, "decode": 0},
    }


def test_a_worker_that_has_changed_its_role_has_a_row_for_each_role() -> None:
    stats = counts(30) | {
        "window_s": 300.0,
        "by_worker": [
            {"worker": "prefill-0", "role": "prefill", "evictions": 0} | counts(20),
            {"worker": "prefill-0", "role": "decode", "evictions": 0} | counts(10),
        ],
        "by_role": {"prefill": counts(20), "decode": counts(10)},
        "blocks": {"total": 1, "free": 1, "cached": 0, "held": 0, "quarantined": 0, "indexed": 0},
        "evictions": 0,
        "saved_prefill_seconds": 0.0,
    }
    console = Console(file=StringIO(), width=100)
    console.print(stats_table(stats))
    assert isinstance(console.file, StringIO)
    rows = [line.split()[:3] for line in console.file.getvalue().splitlines()]
    for row in (["all", "prefill", "20"], ["all", "decode", "10"]):
        assert row in rows
    for row in (["prefill-0", "prefill", "20"], ["prefill-0", "decode", "10"]):
        assert row in rows


def test_long_first_words_leave_the_figures_room_in_a_narrow_terminal() -> None:
    prefix = {
        "hash": "0123456789abcdef",
        "tokens": 1536,
        "saved_tokens": 12345,
        "requests": 37,
        "hit_rate": 0.93,
        "holders": ["prefill-0", "decode-0"],
        "last_used_s": 3.0,
        "first_words": "You are a helpful assistant that answers whatever it is asked at great length and in detail",
    }
    console = Console(file=StringIO(), width=80)
    console.print(top_table({"prefixes": [prefix]}))
    assert isinstance(console.file, StringIO)
    row = next(line.split() for line in console.file.getvalue().splitlines() if "You" in line)
    assert row[:9] == ["01234567", "1536", "12345", "37", "93", "%", "2", "3", "s"]

"""``baton cache stats``: what the table says of workers and their roles."""

from io import StringIO

from rich.console import Console

from compose.cache_view import stats_table


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

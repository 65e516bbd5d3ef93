"""The figures of a run as a table for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from compose.bench.figures import METRICS

_TITLES = {
    "ttft": "time to first token",
    "tpot": "time per output token, without the first",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}


def report(result: Mapping[str, Any], percentiles: Sequence[float], warnings: Sequence[str]) -> RenderableType:
    """Return counts and throughputs, latencies in milliseconds, and what is wrong with the run itself."""
    notes = [Text(f"warning: {warning}", style="yellow") for warning in warnings]
    notes += [Text(f"failed: {count} times: {error}", style="red") for error, count in result["errors"].items()]
    return Group(_counts(result), _latencies(result, percentiles), *notes)


def _counts(result: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_header=False, padding=(0, 1))
    table.add_column()
    table.add_column(justify="right")
    rate = result["request_rate"]
    rows = [
        ("requests completed", f"{result['completed']}"),
        ("requests failed", f"{result['failed']}"),
        ("duration", f"{result['duration']:.2f} s"),
        ("request rate asked for", "inf" if rate == "inf" else f"{rate:.2f} /s"),
        ("request throughput", f"{result['request_throughput']:.2f} /s"),
        ("input tokens", f"{result['total_input_tokens']}"),
        ("of them cached", f"{result['total_cached_tokens']}"),
        ("output tokens", f"{result['total_output_tokens']}"),
        ("output throughput", f"{result['output_throughput']:.2f} tokens/s"),
        ("peak output throughput", f"{result['max_output_tokens_per_s']:.0f} tokens/s"),
        ("total throughput", f"{result['total_token_throughput']:.2f} tokens/s"),
        ("most requests at once", f"{result['max_concurrent_requests']}"),
    ]
    if result["request_goodput"] is not None:
        rows.insert(5, ("goodput", f"{result['request_goodput']:.2f} /s"))
    for row in rows:
        table.add_row(*row)
    return table


def _latencies(result: Mapping[str, Any], percentiles: Sequence[float]) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    table.add_column("ms")
    columns = ("mean", "median", "std", *(f"p{p:g}" for p in percentiles if p != 50))
    for name in columns:
        table.add_column(name, justify="right")
    for metric in METRICS:
        table.add_row(_TITLES[metric], *(f"{result[f'{name}_{metric}_ms']:.2f}" for name in columns))
    return table

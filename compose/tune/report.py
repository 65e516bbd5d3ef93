"""What ``baton tune`` found, as a table, a sentence and a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from common.errors import ConfigError
from compose.tune.outcome import Outcome, best, strain
from gateway.planner.pressure import Targets

COLUMNS = ("P:D", "goodput/s", "good", "TTFT p95", "ITL p95", "queue", "KV use", "bottleneck")


def outcome_table(outcomes: Sequence[Outcome], targets: Targets) -> Table:
    """Return a row for each ratio; times in milliseconds, the recommended one marked."""
    choice = best(outcomes, targets)
    title = f"good: first token within {targets.ttft_s:g} s, {targets.itl_s * 1e3:g} ms between tokens; times in ms"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), title=title)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "bottleneck" else "right", no_wrap=True)
    for one in outcomes:
        times = (one.ttft_p95_s, one.itl_p95_s, one.queue_s)
        table.add_row(
            f"{'→ ' if one is choice else ''}{one.ratio}",
            f"{one.goodput:.2f}",
            f"{one.good_share:.0%}",
            *(f"{seconds * 1e3:.0f}" for seconds in times),
            f"{one.kv_use:.0%}",
            one.bottleneck,
        )
    return table


def recommendation(outcomes: Sequence[Outcome], targets: Targets) -> str:
    """Return which ratio to take, by how much it is better, and how far it is from its targets."""
    choice = best(outcomes, targets)
    others = [one for one in outcomes if one is not choice]
    said = f"recommended: {choice.ratio}, {choice.goodput:.2f} good answers a second"
    if others:
        second = best(others, targets)
        margin = choice.goodput / second.goodput - 1 if second.goodput else float("inf")
        said += f", {margin:+.0%} to {second.ratio}" if second.goodput else f"; {second.ratio} has none"
    room = 1 - strain(choice, targets)
    said += f"; its tails are {abs(room):.0%} {'below' if room >= 0 else 'above'} their targets"
    if choice.bottleneck != "none":
        said += f"; held back by: {choice.bottleneck}"
    return said


def plot(outcomes: Sequence[Outcome], targets: Targets, path: Path) -> None:
    """Draw goodput and tails over the ratios; raises ConfigError without matplotlib or when it cannot be written."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: pip install 'baton[plot]'") from error
    names = [str(one.ratio) for one in outcomes]
    upper, lower = (figure := Figure(figsize=(7, 6), layout="constrained")).subplots(2, 1, sharex=True)
    upper.bar(names, [one.goodput for one in outcomes], color="tab:blue")
    upper.set(ylabel="good answers a second", title="prefill : decode")
    parts = {
        "first token, p95": [one.ttft_p95_s / targets.ttft_s for one in outcomes],
        "between tokens, p95": [one.itl_p95_s / targets.itl_s for one in outcomes],
        "KV use": [one.kv_use for one in outcomes],
    }
    for label, values in parts.items():
        lower.plot(names, [min(value, 10.0) for value in values], marker="o", label=label)
    lower.axhline(1.0, linestyle="--", color="grey", label="target")
    lower.set(ylabel="of the target (cut at 10)", xlabel="prefill workers : decode workers")
    lower.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error

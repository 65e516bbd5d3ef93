"""``baton ratio``: the pools' pressures and the planner's decisions, in a terminal of 80 columns."""

from io import StringIO

from rich.console import Console
from rich.table import Table

from common.messages import PlannerStep
from compose.ratio import pressure_table, steps_table
from compose.status import ClusterView, Planner, Pressure, Ratio

STEP = PlannerStep(1_700_000_000, "to_decode", "decode_warm", "2:2", 0.02, 0.69, 0.05, 0, "prefill-0 done in 1.20 s")


def shown(table: Table) -> str:
    console = Console(width=80, file=StringIO())
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_each_pool_is_a_row_with_what_its_pressure_is_made_of() -> None:
    seen = Pressure(0.5, 1.25, 0.5, 0.75, 0.4, 1.25, 0.1, "registry")
    text = shown(pressure_table(ClusterView((), Ratio(1, 3), seen, Planner())))
    assert "ratio 1:3" in text
    assert "queue 0.50, busy 75%" in text
    assert "KV 0.40, ITL 1.25, wait for room 0.10" in text
    assert "unknown is: registry" in text
    assert "…" not in text


def test_a_decision_shows_its_inputs_and_its_outcome() -> None:
    text = " ".join(shown(steps_table([STEP])).split())
    for part in ("2:2", "0.02", "0.69", "to_decode", "1.20"):
        assert part in text

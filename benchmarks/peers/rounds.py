"""All rounds: every engine once in each, one after the other, in an order that turns by one from round to round."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from benchmarks.peers.engines import Round, measure_engine
from benchmarks.peers.measurement import END, Measurement, Part, ResultFile

Item = TypeVar("Item")


def measure_rounds(
    results: ResultFile, engines: Sequence[str], model: Path, home: Path, say: Callable[[str], None]
) -> None:
    """Measure what is not in ``results`` yet, and keep each figure there as soon as it is known."""
    budget = results.settings.budget
    for number in range(budget.rounds):
        this = Round(number, budget, model, home)
        for engine in turned(engines, number):
            if results.has(number, engine):
                continue
            say(f"round {number + 1} of {budget.rounds}: {engine}")
            for part in _with_end(measure_engine(engine, this)):
                results.add(_measurement(number, engine, part))
                if part.workload != END:
                    say(f"  {part.workload}: {part.error or _short(part)}")


def turned(items: Sequence[Item], by: int) -> list[Item]:
    """Return the items in order, beginning ``by`` later. Pure."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def _with_end(parts: Iterator[Part]) -> Iterator[Part]:
    yield from parts
    yield Part(END)


def _measurement(number: int, engine: str, part: Part) -> Measurement:
    return Measurement(number, engine, part.workload, part.figures, part.warnings, part.error)


def _short(part: Part) -> str:
    figures = ", ".join(f"{name} {value:.4g}" for name, value in part.figures.items())
    return figures + "".join(f" [{warning}]" for warning in part.warnings)

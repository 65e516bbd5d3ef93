"""Medians over rounds, and ratios inside each round. Pure.

A figure that the client itself may have made is not used; where more than half of the rounds have such, or none has a
figure at all, there is a reason instead of a number.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.peers.measurement import Measurement


@dataclass(frozen=True, slots=True)
class Key:
    """Which figure of which workload on which engine."""

    engine: str
    workload: str
    figure: str = "tokens_per_s"


@dataclass(frozen=True, slots=True)
class Found:
    """A number, or why there is none."""

    value: float | None
    why: str = ""


class Results:
    """Reads measurements. They are not changed."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._of: dict[tuple[str, str], list[Measurement]] = {}
        for one in measurements:
            self._of.setdefault((one.engine, one.workload), []).append(one)

    def median(self, key: Key) -> Found:
        """Return the median over the rounds."""
        values = self._values(key)
        return Found(statistics.median(values.values())) if values else Found(None, self.why_not(key))

    def ratio(self, over: Key, under: Key) -> Found:
        """Return the median of the ratios inside each round, so that both sides met the same machine."""
        overs, unders = self._values(over), self._values(under)
        for key, values in ((over, overs), (under, unders)):
            if not values:
                return Found(None, self.why_not(key))
        ratios = [overs[number] / unders[number] for number in overs if unders.get(number)]
        return Found(statistics.median(ratios)) if ratios else Found(None, "no round has both sides")

    def best(self, keys: Sequence[Key]) -> Key | None:
        """Return the key with the largest median; None when nothing was measured."""
        values = {key: found.value for key in keys if (found := self.median(key)).value is not None}
        return max(values, key=lambda key: values[key] or 0.0) if values else None

    def why_not(self, key: Key) -> str:
        """Return why there is no number."""
        of = self._of.get((key.engine, key.workload), [])
        if warnings := [one.warnings[0] for one in of if one.warnings]:
            return f"no figure, the client was in the way: {warnings[0].partition(':')[0]}"
        errors = [one.error for one in of if one.error] or self._errors(key.engine)
        return f"not measured: {errors[0]}" if errors else "not measured"

    def _values(self, key: Key) -> dict[int, float]:
        """Return the figure by round, of rounds in which it can be believed."""
        of = [one for one in self._of.get((key.engine, key.workload), []) if not one.error]
        fine = {one.round: one.figures[key.figure] for one in of if key.figure in one.figures and not one.warnings}
        return fine if 2 * len(fine) >= len(of) else {}

    def _errors(self, engine: str) -> list[str]:
        return [one.error for (name, _), of in self._of.items() if name == engine for one in of if one.error]

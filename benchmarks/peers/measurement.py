"""What was measured, kept in a file of JSON lines: the settings first, then a line for each figure as it comes.

A run that was broken off is continued: what an engine measured in a round counts once its line :data:`END` is there.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.peers.budget import Budget
from common.errors import ConfigError

END = "end"
"""Workload of the line that ends an engine's part of a round."""


class Settings(msgspec.Struct, frozen=True):
    """What the figures of one file have in common."""

    date: str
    machine: str
    command: str
    budget: Budget


class Part(msgspec.Struct, frozen=True):
    """The figures of one workload, from whoever measured it."""

    workload: str
    figures: dict[str, float] = {}
    warnings: list[str] = []
    error: str = ""


class Measurement(msgspec.Struct, frozen=True):
    """The same with the round and the engine."""

    round: int
    engine: str
    workload: str
    figures: dict[str, float] = {}
    warnings: list[str] = []
    """Why the client, not the engine, may have been measured."""
    error: str = ""


class ResultFile:
    """One file of results. Owned by the run that writes it."""

    def __init__(self, path: Path, settings: Settings) -> None:
        self._path = path
        self.settings = settings
        self.measurements: list[Measurement] = []

    @classmethod
    def open(cls, path: Path, settings: Settings) -> "ResultFile":
        """Continue the file at ``path`` or begin it; raises ConfigError when it was made with other settings."""
        file = cls(path, settings)
        if path.is_file() and (lines := path.read_bytes().splitlines()):
            file.settings = msgspec.json.decode(lines[0], type=Settings)
            if file.settings.budget != settings.budget:
                raise ConfigError(f"{path} was measured with other options; remove it or name another with --results")
            file.measurements = completed(_decode(lines[1:]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(_line(one) for one in (file.settings, *file.measurements)))
        return file

    def add(self, measurement: Measurement) -> None:
        """Keep a measurement; it is on disk when this returns."""
        self.measurements.append(measurement)
        with self._path.open("ab") as file:
            file.write(_line(measurement))

    def has(self, round_number: int, engine: str) -> bool:
        """Whether an engine's part of a round is complete."""
        return any(one.workload == END for one in self.measurements if _part(one) == (round_number, engine))


def completed(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements of parts that came to their end. Pure."""
    ended = {_part(one) for one in measurements if one.workload == END}
    return [one for one in measurements if _part(one) in ended]


def _part(measurement: Measurement) -> tuple[int, str]:
    return measurement.round, measurement.engine


def _decode(lines: Sequence[bytes]) -> list[Measurement]:
    """Return what the lines say; one that was cut off by a crash is left out."""
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Measurement))
        except msgspec.DecodeError:
            continue
    return found


def _line(value: msgspec.Struct) -> bytes:
    return msgspec.json.encode(value) + b"\n"

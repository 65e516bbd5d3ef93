"""What arrives when: made from a rate, or read from a trace in the Mooncake, BurstGPT or Azure form.

    Mooncake JSONL   {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}  (Qin et al., FAST 25)
    BurstGPT CSV     Timestamp,Model,Request tokens,Response tokens,...   seconds; failed ones have 0 response tokens
    Azure CSV        TIMESTAMP,ContextTokens,GeneratedTokens              a date and time

A hash id stands for 512 tokens of a prompt; equal leading ids are an equal prefix. The other forms share nothing.
"""

import csv
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from common.errors import ConfigError

ID_TOKENS = 512
"""Tokens that a hash id stands for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    """Seconds from the trace's start."""
    prompt_tokens: int
    answer_tokens: int
    hash_ids: tuple[int, ...] = ()

    def token_ids(self, number: int) -> list[int]:
        """Return a prompt, equal to others' as far as the hash ids say so; ``number`` tells requests apart."""
        shared = [hash_id * ID_TOKENS + at for hash_id in self.hash_ids for at in range(ID_TOKENS)]
        own = random.Random(number).choices(range(1 << 30, 1 << 31), k=max(0, self.prompt_tokens - len(shared)))
        return (shared + own)[: self.prompt_tokens]


def poisson(*, isl: int, osl: int, rate: float, seconds: float, seed: int = 0, start_s: float = 0.0) -> list[Arrival]:
    """Return arrivals at random times, ``rate`` a second, of prompts and answers of these lengths."""
    draw, at_s, found = random.Random(seed), start_s, list[Arrival]()
    while (at_s := at_s + draw.expovariate(rate)) < start_s + seconds:
        found.append(Arrival(at_s, isl, osl))
    return found


def scaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Return ``arrivals`` stretched or squeezed to ``rate`` requests a second on average."""
    span_s = arrivals[-1].at_s if arrivals else 0.0
    factor = len(arrivals) / rate / span_s if span_s else 1.0
    return [replace(arrival, at_s=arrival.at_s * factor) for arrival in arrivals]


def read_trace(path: Path, limit: int) -> list[Arrival]:
    """Return the first ``limit`` requests of a trace, from second 0; raises ConfigError when it cannot be read."""
    try:
        with path.open(newline="") as lines:
            found = sorted(_parse(lines), key=lambda arrival: arrival.at_s)[:limit]
    except OSError as error:
        raise ConfigError(f"--trace {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--trace {path} is not in the Mooncake, BurstGPT or Azure form: {error}") from error
    if not found:
        raise ConfigError(f"--trace {path} has no requests")
    return [replace(arrival, at_s=arrival.at_s - found[0].at_s) for arrival in found]


def _parse(lines: Iterable[str]) -> Iterator[Arrival]:
    rows = iter(lines)
    first = next(rows, "")
    if first.lstrip().startswith("{"):
        for line in (first, *rows):
            if line.strip():
                yield _mooncake(json.loads(line))
        return
    columns = next(csv.reader([first]), [])
    make = _burst_gpt if "Request tokens" in columns else _azure
    for row in csv.DictReader(rows, columns):
        arrival = make(row)
        if arrival.prompt_tokens > 0 and arrival.answer_tokens > 0:
            yield arrival


def _mooncake(row: Mapping[str, Any]) -> Arrival:
    ids = tuple(int(hash_id) for hash_id in row.get("hash_ids", ()))
    return Arrival(row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"]), ids)


def _burst_gpt(row: Mapping[str, str]) -> Arrival:
    return Arrival(float(row["Timestamp"]), int(row["Request tokens"]), int(row["Response tokens"]))


def _azure(row: Mapping[str, str]) -> Arrival:
    moment = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])  # seven digits of a second are one too many
    return Arrival(moment.timestamp(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))

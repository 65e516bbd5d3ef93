"""A trace in the Mooncake form (Qin et al., FAST '25): one JSON object a line, made from a fixed seed.

    {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}

A hash id stands for 512 tokens of a prompt (the last one for what is left); equal leading ids are an equal prefix.
Three kinds of traffic are mixed: chats of several turns behind one of a few system prompts, agents that send one long
shared context with short questions, and floods of prompts that never come again.

    python -m benchmarks.mooncake_trace > trace.jsonl
"""

import json
import random
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ID_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace."""

    timestamp: int
    """Milliseconds from the trace's start."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    def token_ids(self) -> list[int]:
        """Return tokens that are equal where the ids say so."""
        tokens = [hash_id * ID_TOKENS + at for hash_id in self.hash_ids for at in range(ID_TOKENS)]
        return tokens[: self.input_length]


class _Ids:
    def __init__(self) -> None:
        self.num_given = 0

    def fresh(self, count: int) -> list[int]:
        first, self.num_given = self.num_given, self.num_given + count
        return list(range(first, self.num_given))


def generate(num_requests: int = 1200, seed: int = 4) -> list[Request]:
    """Return a trace of ``num_requests`` in order of time."""
    draw, ids = random.Random(seed), _Ids()
    systems = [ids.fresh(draw.randint(1, 4)) for _ in range(6)]
    contexts = [ids.fresh(draw.randint(8, 24)) for _ in range(8)]
    found: list[Request] = []
    while len(found) < num_requests:
        start = draw.randrange(num_requests * 500)
        kind = draw.random()
        if kind < 0.45:
            found += _chat(draw, ids, draw.choice(systems), start)
        elif kind < 0.75:
            found.append(_request(draw, start, draw.choice(contexts) + ids.fresh(1)))
        else:
            flood = draw.randint(2, 6)
            found += [_request(draw, start + 20 * n, ids.fresh(draw.randint(4, 16))) for n in range(flood)]
    return sorted(found[:num_requests], key=lambda request: request.timestamp)


def _chat(draw: random.Random, ids: _Ids, system: list[int], start: int) -> Iterator[Request]:
    history = list(system)
    for _ in range(draw.randint(2, 8)):
        history = history + ids.fresh(draw.randint(1, 3))
        yield _request(draw, start, history)
        start += draw.randint(5_000, 60_000)


def _request(draw: random.Random, timestamp: int, hash_ids: list[int]) -> Request:
    missing = draw.randrange(ID_TOKENS)  # the last id is rarely full
    return Request(timestamp, len(hash_ids) * ID_TOKENS - missing, draw.randint(20, 400), tuple(hash_ids))


def read(lines: Iterable[str]) -> list[Request]:
    """Return the requests that ``lines`` hold; further fields of a line are left alone."""
    rows = [json.loads(line) for line in lines if line.strip()]
    return [
        Request(row["timestamp"], row["input_length"], row["output_length"], tuple(row["hash_ids"])) for row in rows
    ]


def write(trace: Iterable[Request]) -> Iterator[str]:
    """Yield the lines of ``trace``."""
    for one in trace:
        row = {"timestamp": one.timestamp, "input_length": one.input_length, "output_length": one.output_length}
        yield json.dumps(row | {"hash_ids": one.hash_ids})


def main() -> None:
    """Write the trace to stdout."""
    for line in write(generate()):
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()

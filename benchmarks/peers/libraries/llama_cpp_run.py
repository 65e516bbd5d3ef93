"""Measures llama.cpp's Python build in its own environment: needs nothing but ``llama_cpp``. See library.py.

``Llama.generate`` as its users call it: one sequence, so only a batch of 1. The time of the first token is the
prompt's, the rest is decoding.
"""

import json
import statistics
import sys
import time
from collections.abc import Sequence

from llama_cpp import Llama


def say(workload: str, **figures: float) -> None:
    """Write one part."""
    sys.stdout.write(json.dumps({"workload": workload, "figures": figures}) + "\n")
    sys.stdout.flush()


def times(model: Llama, prompt: Sequence[int], count: int) -> list[float]:
    """Write ``count`` tokens behind a prompt; return when it began and when each token was there."""
    model.reset()
    found = [time.perf_counter()]
    for _ in model.generate(prompt, temp=0.0):
        found.append(time.perf_counter())
        if len(found) > count:
            break
    return found


def main() -> None:
    """Measure what the job says."""
    job = json.load(sys.stdin)
    longest = max(map(len, (*job["prefills"], *job["contexts"])))
    model = Llama(
        job["model"],
        n_ctx=longest + 2 * job["answer"] + 256,
        n_threads=job["threads"],
        n_threads_batch=job["threads"],
        verbose=False,
    )
    times(model, job["contexts"][0][:64], 8)  # warm up
    rates: dict[int, list[float]] = {}
    for prompt in job["prefills"]:
        began, first = times(model, prompt, 1)
        rates.setdefault(len(prompt), []).append(len(prompt) / (first - began))
    for length, found in rates.items():
        say(f"prefill {length}", tokens_per_s=statistics.median(found))
    _, first, *rest = times(model, job["contexts"][0], job["answer"])
    say("decode x 1", tokens_per_s=len(rest) / (rest[-1] - first))


if __name__ == "__main__":
    main()

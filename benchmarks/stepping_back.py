"""What decode steps suffer from prompts that are computed beside them, by how far the prompts step back.

    python -m benchmarks.stepping_back MODEL [--nice 0 10] [--prompt-threads 1 2] [--busy 0 1] [--rounds 5]

One process decodes as a decode worker does, with ``--threads``, and pauses after each step as one that serves; another
computes prompts of 512 tokens without a pause, that much nicer and with that many threads. ``--busy`` processes besides
only turn in a loop. All take turns, a few seconds each, so that whatever else the machine does meets all alike.
"""

import argparse
import multiprocessing as mp
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.model import BLOCK_SIZE
from benchmarks.neighbours import Setting, neighbours, workers
from common.model.batch import Row, build_step
from common.model.load import load_model
from common.model.runner import ModelRunner
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage

PROMPT = 512


@dataclass(frozen=True, slots=True)
class Prompts:
    """How a process computes prompts."""

    nice: int
    threads: int


def compute_prompts(setting: Setting, prompts: Prompts, pipe: Connection) -> None:
    """Load, say so, and at each request compute prompts for a while and send the tokens a second; None ends it."""
    os.nice(prompts.nice)
    torch.set_num_threads(prompts.threads)
    loaded = load_model(setting.model, dtype=setting.dtype, device="cpu", max_model_len=None)
    layout = KvLayout(loaded.spec.layers, BLOCK_SIZE, loaded.spec.dtype)
    storage = KvStorage(layout, PROMPT // BLOCK_SIZE, loaded.spec.device)
    runner = ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE, setting.kernels)
    step = build_step([Row([7] * PROMPT, 0, list(range(PROMPT // BLOCK_SIZE)), wants_logits=True)], BLOCK_SIZE)
    runner.forward(step)
    pipe.send("loaded")
    while pipe.recv():
        began, count = time.perf_counter(), 0
        while time.perf_counter() < began + setting.seconds:
            runner.forward(step)
            count += 1
        pipe.send(count * PROMPT / (time.perf_counter() - began))


@contextmanager
def computing(setting: Setting, prompts: Prompts) -> Iterator[Connection]:
    """Yield the pipe of a loaded process that computes prompts."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=compute_prompts, args=(setting, prompts, theirs), daemon=True)
    process.start()
    ours.recv()
    yield ours
    ours.send(None)
    process.join()


def measure(decoding: Connection, computing: Connection | None) -> tuple[list[float], float]:
    """Return the milliseconds of decode steps, and the prompt tokens a second beside them."""
    for pipe in filter(None, (decoding, computing)):
        pipe.send(True)
    steps = decoding.recv()
    return steps, 0.0 if computing is None else computing.recv()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--nice", type=int, nargs="+", default=[0, 10])
    parser.add_argument("--prompt-threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    setting = Setting(args.model, args.dtype, "auto", args.threads, args.seconds)
    steps: dict[tuple[int, str], list[float]] = defaultdict(list)
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        (decoding,) = stack.enter_context(workers(replace(setting, pause_s=0.002), 1))
        company: dict[str, Connection | None] = {"none": None}
        for nice in args.nice:
            for threads in args.prompt_threads:
                prompts = Prompts(nice, threads)
                company[f"nice {nice}, {threads} thr."] = stack.enter_context(computing(setting, prompts))
        for _ in range(args.rounds):
            for busy in args.busy:
                for name, pipe in company.items():
                    with neighbours(busy):
                        times, rate = measure(decoding, pipe)
                    steps[busy, name] += times
                    rates[busy, name].append(rate)
    table = Table(title=f"decode beside prompts, {args.threads} thread(s), {args.dtype}; ms a step")
    for column in ("busy", "prompts", "steps", "median", "p99", "longest", "prompt tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for (busy, name), times in sorted(steps.items()):
        figures = (np.median(times), np.percentile(times, 99), max(times))
        row = (*(f"{figure:.1f}" for figure in figures), f"{np.median(rates[busy, name]):.0f}")
        table.add_row(str(busy), name, str(len(times)), *row)
    Console().print(table)


if __name__ == "__main__":
    main()

"""How much decode steps suffer when other processes want the same cores.

    python -m benchmarks.neighbours MODEL [--workers 2] [--threads 2] [--busy 1] [--kernels auto numba]

Each worker is a process that decodes as a decode worker does, with ``--threads`` compute threads; ``--busy`` processes
do nothing but turn in a loop. First one worker runs alone, then all of them together. A step that waits at a barrier
for a thread without a core shows in the tail: nothing here is more than the share of the machine that a worker gets.
``numba`` runs the products on torch's own threads (OpenMP).
"""

import argparse
import multiprocessing as mp
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.model import BLOCK_SIZE
from common.model.batch import Row, build_step
from common.model.load import load_model
from common.model.runner import ModelRunner
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage

BATCH = 8
CONTEXT = 128


@dataclass(frozen=True, slots=True)
class Setting:
    """What each worker runs."""

    model: str
    dtype: str
    kernels: str
    threads: int
    seconds: float
    pause_s: float = 0.0
    """Between two steps, when the core is somebody else's to take."""


def decode(setting: Setting, pipe: Connection) -> None:
    """Load, say so, and at each request decode for a while and send the milliseconds of each step; None ends it."""
    torch.set_num_threads(setting.threads)
    loaded = load_model(setting.model, dtype=setting.dtype, device="cpu", max_model_len=None)
    blocks = CONTEXT // BLOCK_SIZE + 1
    layout = KvLayout(loaded.spec.layers, BLOCK_SIZE, loaded.spec.dtype)
    storage = KvStorage(layout, BATCH * blocks, loaded.spec.device)
    runner = ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE, setting.kernels)
    tables = [list(range(index * blocks, (index + 1) * blocks)) for index in range(BATCH)]
    step = build_step([Row([7], CONTEXT, table, wants_logits=True) for table in tables], BLOCK_SIZE)
    runner.forward(step)
    pipe.send("loaded")
    while pipe.recv():
        times = []
        end = time.perf_counter() + setting.seconds
        while (began := time.perf_counter()) < end:
            runner.forward(step)
            times.append(1e3 * (time.perf_counter() - began))
            time.sleep(setting.pause_s)
        pipe.send(times)


def turn() -> None:
    """Keep a core busy."""
    while True:
        pass


@contextmanager
def workers(setting: Setting, count: int) -> Iterator[list[Connection]]:
    """Yield the pipes of ``count`` loaded workers."""
    context = mp.get_context("spawn")
    pairs = [context.Pipe() for _ in range(count)]
    processes = [context.Process(target=decode, args=(setting, theirs), daemon=True) for _, theirs in pairs]
    for process in processes:
        process.start()
    pipes = [ours for ours, _ in pairs]
    for pipe in pipes:
        pipe.recv()
    yield pipes
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Keep ``count`` processes busy meanwhile."""
    processes = [mp.get_context("spawn").Process(target=turn, daemon=True) for _ in range(count)]
    for process in processes:
        process.start()
    yield
    for process in processes:
        process.terminate()
        process.join()


def measure(pipes: list[Connection]) -> list[float]:
    """Let all decode at the same time; return the milliseconds of all their steps."""
    for pipe in pipes:
        pipe.send(True)
    return [step for pipe in pipes for step in pipe.recv()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kernels", nargs="+", default=["auto", "numba"])
    parser.add_argument("--seconds", type=float, default=8.0)
    args = parser.parse_args()
    table = Table(title=f"decode x {BATCH}, {args.threads} thread(s) a worker, {args.dtype}; ms a step")
    for column in ("kernels", "company", "steps", "median", "p99", "longest"):
        table.add_column(column, justify="right")
    for kernels in args.kernels:
        with workers(Setting(args.model, args.dtype, kernels, args.threads, args.seconds), args.workers) as pipes:
            rows = {"alone": measure(pipes[:1]), f"{args.workers} workers": measure(pipes)}
            with neighbours(args.busy):
                rows[f"{args.workers} workers, {args.busy} busy"] = measure(pipes)
        for company, steps in rows.items():
            figures = (np.median(steps), np.percentile(steps, 99), max(steps))
            table.add_row(kernels, company, str(len(steps)), *(f"{figure:.1f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    main()

"""How fast the model itself runs here, without scheduling, transfer or HTTP: prefill and decode tokens a second.

    python -m benchmarks.model MODEL [--dtype float32 bfloat16] [--threads 1] [--kernels auto numba] [--work decode]

MODEL is a directory or a hub name. Prefill computes one prompt in one step; decode adds a token to each of a batch of
sequences that begin at ``--context`` tokens, and samples greedily. Each figure is the best of several runs; on a
machine with other work the time on a processor is the one to read, with one thread.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from common.model.batch import Row, build_step
from common.model.load import load_model
from common.model.loaded import LoadedModel
from common.model.runner import ModelRunner
from common.model.sample_row import SampleRow
from common.model.sampler import sample
from common.sampling import SamplingParams
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage

BLOCK_SIZE = 16
PROMPTS = (512, 2048)
BATCHES = (1, 8, 32)


@dataclass(frozen=True, slots=True)
class Figure:
    """The best of several runs of one step, by the clock and by the time of all threads on a processor."""

    wall_s: float
    cpu_s: float

    def better(self, other: "Figure") -> "Figure":
        """Return the smaller of both times."""
        return Figure(min(self.wall_s, other.wall_s), min(self.cpu_s, other.cpu_s))


class Bench:
    """One loaded model with a pool that fits the largest run, and a runner for each version of the kernels."""

    def __init__(self, loaded: LoadedModel, kernels: list[str], context: int, runs: int) -> None:
        self._context, self._runs = context, runs
        tokens = max(*PROMPTS, max(BATCHES) * (context + 4 * runs + BLOCK_SIZE))
        layout = KvLayout(loaded.spec.layers, BLOCK_SIZE, loaded.spec.dtype)
        storage = KvStorage(layout, -(-tokens // BLOCK_SIZE), loaded.spec.device)
        self._order = torch.randperm(storage.num_blocks).tolist()
        self._runners = {name: ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE, name) for name in kernels}
        for runner in self._runners.values():
            runner.warm_up()

    def prefill(self, num_tokens: int) -> dict[str, Figure]:
        """Compute one prompt in one step."""
        step = build_step([Row(self._tokens(num_tokens), 0, self._order, wants_logits=True)], BLOCK_SIZE)
        return self._best(lambda runner, run: runner.forward(step))

    def decode(self, batch: int) -> dict[str, Figure]:
        """Add one token to each of ``batch`` sequences."""
        blocks = len(self._order) // batch
        tables = [self._order[index * blocks :][:blocks] for index in range(batch)]
        params = [SampleRow(SamplingParams(1, temperature=0.0), 0, self._context)] * batch

        def step(runner: ModelRunner, run: int) -> None:
            rows = [Row([7], self._context + run, table, wants_logits=True) for table in tables]
            sample(runner.forward(build_step(rows, BLOCK_SIZE)), params)

        return self._best(step)

    def _best(self, step: Callable[[ModelRunner, int], object]) -> dict[str, Figure]:
        """Return the best of each version; they take turns, so that a busy moment of the machine meets all."""
        best: dict[str, Figure] = {}
        for run in range(self._runs):
            for name, runner in self._runners.items():
                began, cpu_began = time.perf_counter(), time.process_time()
                step(runner, run)
                figure = Figure(time.perf_counter() - began, time.process_time() - cpu_began)
                best[name] = figure.better(best.get(name, figure))
        return best

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(10, 400, (count,)).tolist()


def show(title: str, bench: Bench, work: list[str]) -> None:
    """Measure ``prefill``, ``decode`` or both, and print one table."""
    table = Table(title=title)
    for column in ("step", "kernels", "tokens/s", "tokens/s of CPU time", "ms", "ms of CPU time"):
        table.add_column(column, justify="right")
    for num_tokens in PROMPTS if "prefill" in work else ():
        _add(table, f"prefill {num_tokens}", num_tokens, bench.prefill(num_tokens))
    for batch in BATCHES if "decode" in work else ():
        _add(table, f"decode x {batch}", batch, bench.decode(batch))
    Console().print(table)


def _add(table: Table, step: str, tokens: int, figures: dict[str, Figure]) -> None:
    for name, figure in figures.items():
        rates = (f"{tokens / seconds:.0f}" for seconds in (figure.wall_s, figure.cpu_s))
        times = (f"{1e3 * seconds:.1f}" for seconds in (figure.wall_s, figure.cpu_s))
        table.add_row(step, name, *rates, *times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--kernels", nargs="+", default=["auto"])
    parser.add_argument("--work", nargs="+", choices=("prefill", "decode"), default=["prefill", "decode"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence before decoding")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype in args.dtype:
        loaded = load_model(args.model, dtype=dtype, device="auto", max_model_len=None)
        bench = Bench(loaded, args.kernels, args.context, args.runs)
        show(f"{loaded.spec.name}, {dtype}, {args.threads} thread(s)", bench, args.work)


if __name__ == "__main__":
    main()

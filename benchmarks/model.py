"""How fast the model itself runs here, without scheduling, transfer or HTTP: prefill and decode tokens a second.

    python -m benchmarks.model MODEL [--dtype float32 bfloat16] [--threads 1] [--kernels auto eager] [--context 512]

MODEL is a directory or a hub name. Prefill computes one prompt in one step; decode adds a token to each of a batch of
sequences that begin at ``--context`` tokens, and samples greedily. Each figure is the best of several runs.
The share is what attention and cache writes take of the step.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from common.model.batch import Row, build_step
from common.model.load import load_model
from common.model.loaded import LoadedModel
from common.model.runner import ModelRunner
from common.model.sample_row import SampleRow
from common.model.sampler import sample
from common.sampling import SamplingParams
from kernels.attention_form import AttentionForm
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows
from kernels.select import Kernels
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage

BLOCK_SIZE = 16
PROMPTS = (512, 2048)
BATCHES = (1, 8, 32)


@dataclass(slots=True)
class TimedKernels:
    """Passes calls on to ``kernels`` and adds up the seconds they take."""

    kernels: Kernels
    name: str = "timed"
    seconds: float = field(default=0.0)

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV, rows: PackedRows) -> None:
        with self._timed():
            self.kernels.store_kv(k, v, kv, rows)

    def paged_attention(
        self, q: Tensor, kv: LayerKV, rows: PackedRows, form: AttentionForm, sinks: Tensor | None
    ) -> Tensor:
        with self._timed():
            return self.kernels.paged_attention(q, kv, rows, form, sinks)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


@dataclass(frozen=True, slots=True)
class Figure:
    """The best of several runs of one step."""

    seconds: float
    share: float
    """Attention and cache writes, of 1."""


class Bench:
    """One loaded model with a pool that fits the largest run."""

    def __init__(self, loaded: LoadedModel, kernels: str, context: int, runs: int) -> None:
        self._context, self._runs = context, runs
        tokens = max(*PROMPTS, max(BATCHES) * (context + 4 * runs + BLOCK_SIZE))
        layout = KvLayout(loaded.spec.layers, BLOCK_SIZE, loaded.spec.dtype)
        storage = KvStorage(layout, -(-tokens // BLOCK_SIZE), loaded.spec.device)
        self._order = torch.randperm(storage.num_blocks).tolist()
        self._runner = ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE, kernels)
        self._timer = TimedKernels(self._runner.kernels)
        self._runner.kernels = self._timer
        self._runner.warm_up()

    def prefill(self, num_tokens: int) -> Figure:
        """Compute one prompt in one step."""
        step = build_step([Row(self._tokens(num_tokens), 0, self._order, wants_logits=True)], BLOCK_SIZE)
        return self._best(lambda run: self._runner.forward(step))

    def decode(self, batch: int) -> Figure:
        """Add one token to each of ``batch`` sequences."""
        blocks = len(self._order) // batch
        tables = [self._order[index * blocks :][:blocks] for index in range(batch)]
        params = [SampleRow(SamplingParams(1, temperature=0.0), 0, self._context)] * batch

        def step(run: int) -> None:
            rows = [Row([7], self._context + run, table, wants_logits=True) for table in tables]
            sample(self._runner.forward(build_step(rows, BLOCK_SIZE)), params)

        return self._best(step)

    def _best(self, step: Callable[[int], object]) -> Figure:
        figures = []
        for run in range(self._runs):
            self._timer.seconds, began = 0.0, time.perf_counter()
            step(run)
            seconds = time.perf_counter() - began
            figures.append(Figure(seconds, self._timer.seconds / seconds))
        return min(figures, key=lambda figure: figure.seconds)

    def _tokens(self, count: int) -> list[int]:
        return torch.randint(10, 400, (count,)).tolist()


def show(title: str, bench: Bench) -> None:
    """Measure and print one table."""
    table = Table(title=title)
    for column in ("step", "tokens/s", "ms/step", "attention"):
        table.add_column(column, justify="right")
    for num_tokens in PROMPTS:
        _add(table, f"prefill {num_tokens}", num_tokens, bench.prefill(num_tokens))
    for batch in BATCHES:
        _add(table, f"decode x {batch}", batch, bench.decode(batch))
    Console().print(table)


def _add(table: Table, name: str, tokens: int, figure: Figure) -> None:
    table.add_row(name, f"{tokens / figure.seconds:.0f}", f"{1e3 * figure.seconds:.1f}", f"{100 * figure.share:.0f} %")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--kernels", nargs="+", default=["auto"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--context", type=int, default=512, help="tokens of each sequence before decoding")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for dtype in args.dtype:
        loaded = load_model(args.model, dtype=dtype, device="auto", max_model_len=None)
        for kernels in args.kernels:
            bench = Bench(loaded, kernels, args.context, args.runs)
            show(f"{loaded.spec.name}, {dtype}, {kernels} kernels, {args.threads} thread(s)", bench)


if __name__ == "__main__":
    main()

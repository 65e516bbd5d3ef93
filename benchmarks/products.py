"""From how many rows on torch's matrix product beats the compiled one: the numbers of ``kernels/cpu/product_rule.py``.

    python -m benchmarks.products [--levels avx512_bf16 avx2] [--inputs 576] [--outputs 1536]

One thread, time on a processor, best of several runs in turn over matrices that no cache holds together.
"""

import argparse
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import linear

from kernels.cpu.native.library import choose_level, load_library
from kernels.cpu.native.operations import Native, as_linear
from kernels.decoder_layer import LinearWeights

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOTAL_BYTES = 100_000_000
RUNS = 7


def seconds(function: Callable[[], object]) -> float:
    """Return how long ``function`` runs on a processor."""
    began = time.thread_time()
    function()
    return time.thread_time() - began


def compare(native: Native, dtype: torch.dtype, inputs: int, outputs: int, rows: int) -> tuple[float, float]:
    """Return billions of operations a second of the compiled product and of torch's."""
    count = max(1, TOTAL_BYTES // (inputs * outputs * dtype.itemsize))
    weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
    linears = [as_linear(LinearWeights(weight, None)) for weight in weights]
    x: Tensor = torch.randn(rows, inputs).to(dtype)
    ours = theirs = float("inf")
    for _ in range(RUNS):
        ours = min(ours, seconds(lambda: [native.linear(x, one) for one in linears]))
        theirs = min(theirs, seconds(lambda: [linear(x, one) for one in weights]))
    operations = 2e-9 * count * inputs * outputs * rows
    return operations / ours, operations / theirs


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--levels", nargs="+", default=["avx512_bf16", "avx512", "avx2", "portable"])
    parser.add_argument("--inputs", type=int, default=576)
    parser.add_argument("--outputs", type=int, default=1536)
    args = parser.parse_args()
    torch.set_num_threads(1)
    library = load_library()
    if library is None:
        raise SystemExit("the compiled kernels are not built")
    native = Native(library, num_threads=1)
    table = Table(title=f"{args.outputs} outputs of {args.inputs} inputs, GFLOP/s on one core")
    for column in ("level", "dtype", "rows", "GB/s of weights", "compiled", "torch", "ratio"):
        table.add_column(column, justify="right")
    for level in args.levels:
        if choose_level(library, level) is None:
            continue
        for dtype in (torch.float32, torch.bfloat16):
            for rows in ROWS:
                ours, theirs = compare(native, dtype, args.inputs, args.outputs, rows)
                rate = ours / (2 * rows) * dtype.itemsize
                figures = (f"{rate:.1f}", f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}")
                table.add_row(level, str(dtype).removeprefix("torch."), str(rows), *figures)
    Console().print(table)


if __name__ == "__main__":
    main()

"""What the GPU benchmark times with: medians on the device, and the machine's two ceilings."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.testing import do_bench

DEVICE = torch.device("cuda")

_COPY_BYTES = 2**30
_MATRIX_SIDE = 8192
_RUNS = 20


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU does at most, as measured."""

    bytes_per_s: float
    """Bytes read plus bytes written by a large copy."""
    flops_per_s: float
    """Operations of a large bfloat16 matrix product."""

    def floor_s(self, num_bytes: float, flops: float = 0.0) -> float:
        """Return the seconds below which work of so many bytes and operations cannot come."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


def device_seconds(run: Callable[[], object]) -> float:
    """Return the median time of ``run`` on the device, its inputs not in the cache."""
    return float(do_bench(run, warmup=50, rep=200, return_mode="median")) / 1e3


def wall_seconds(run: Callable[[], object]) -> float:
    """Return the median time of ``run`` until the device has ended, the host's part included."""
    for _ in range(3):
        run()
    figures = []
    for _ in range(_RUNS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        figures.append(time.perf_counter() - began)
    return statistics.median(figures)


def measure_ceilings() -> Ceilings:
    """Measure a large copy and a large matrix product."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    copy_s = device_seconds(lambda: target.copy_(source))
    a, b = (normal(_MATRIX_SIDE, _MATRIX_SIDE) for _ in range(2))
    product_s = device_seconds(lambda: a @ b)
    return Ceilings(2 * _COPY_BYTES / copy_s, 2 * _MATRIX_SIDE**3 / product_s)


def normal(*shape: int) -> Tensor:
    """Return random bfloat16 numbers on the GPU: zeros would make it faster than it is."""
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)

"""Compiles every Triton kernel to machine code for an H100 or H200, on a machine without one.

    python -m tests.kernels.compile_for_gpu

The launchers are called with tensors on the CPU; triton specialises and compiles each launch as it would on the GPU and
does not start it. Prints a line a kernel, for :mod:`tests.kernels.test_gpu_compile`: name, dtype, registers a thread,
bytes a thread spills, bytes of shared memory. Must run without TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels.attention_form import AttentionForm
from kernels.gpu import move_blocks
from kernels.gpu.elementwise import TritonElementwise
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.prefill_attention import prefill_attention
from kernels.gpu.sample_rows import NUMBERS, Penalties, penalise_rows, sample_rows
from kernels.gpu.store_kv import store_kv
from kernels.norm_form import NormForm
from tests.kernels.cases import Shape, new_case

HOPPER = GPUTarget("cuda", 90, 32)
BFLOAT16 = torch.bfloat16


class NoDevice:
    """Stands where triton asks about the GPU that it compiles for."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: Any, grid: object) -> Callable[..., None]:
    """Stand for ``kernel[grid]``: a launcher that compiles, prints, and launches nothing."""

    def launch(*arguments: Any, **options: Any) -> None:
        compiled = kernel.run(*arguments, grid=grid, warmup=True, **options)
        usage = resource_usage(compiled.asm["cubin"])
        dtype = str(next(tensor.dtype for tensor in arguments if isinstance(tensor, torch.Tensor)))
        print(kernel.__name__, dtype, usage["REG"], usage["STACK"], compiled.metadata.shared, flush=True)  # noqa: T201

    return launch


def resource_usage(cubin: bytes) -> dict[str, str]:
    """Return what the assembler says about registers and memory of a kernel."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    return dict(re.findall(r"(REG|STACK):(\d+)", told.stdout))


def attention(shape: Shape, form: AttentionForm, splits: int, sinks: bool) -> None:
    """Compile decode and prefill attention of one kind of layer, and the writing of its cache."""
    decode, chunk = new_case(shape, [(1, 70), (1, 9)]), new_case(shape, [(40, 70)])
    column = torch.zeros(decode.q.shape[1], dtype=shape.dtype) if sinks else None
    out = torch.empty(*chunk.q.shape[:2], shape.v_dim, dtype=shape.dtype)
    paged_attention(out, decode.q, decode.kv, decode.rows, form, column, splits)
    prefill_attention(out, chunk.q, chunk.kv, chunk.rows, form, column)
    k, v = (torch.zeros(40, shape.kv_heads, dim, dtype=shape.dtype) for dim in (shape.k_dim, shape.v_dim))
    store_kv(k, v, chunk.kv, chunk.rows)


def others() -> None:
    """Compile what moves blocks and what lies between matrix products."""
    pool, ids = torch.zeros(4, 4096, dtype=BFLOAT16), torch.zeros(2, dtype=torch.int64)
    move_blocks.gather_blocks(pool, ids, pool[:2])
    move_blocks.scatter_blocks(pool[:2], pool, ids)
    move_blocks.copy_blocks(pool, ids, ids)
    fused = TritonElementwise()
    x = torch.zeros(1, 4, 4096, dtype=BFLOAT16)
    fused.rms_norm(x, x[0, 0], NormForm(1e-5))
    fused.rms_norm(x.view(1, 4, 32, 128), x[0, 0, :128], NormForm(1e-5, offset=1.0, rounds_first=False))
    fused.add_rms_norm(x, x, x[0, 0], NormForm(1e-5))
    heads = x.view(1, 4, 32, 128).transpose(1, 2)
    fused.rotary(heads, heads[:, :8], x[..., :128], x[..., :128])
    fused.silu_mul(x)


def sampling() -> None:
    """Compile the sampler for plain and for penalised rows."""
    scores, numbers = torch.zeros(2, 128_256), torch.zeros(2, NUMBERS, dtype=torch.float64)
    keys = torch.zeros(2, dtype=torch.int64)
    sample_rows(scores, numbers, keys)
    sample_rows(scores.double(), numbers, keys)
    ids, counts = torch.zeros(2, 100, dtype=torch.int64), torch.zeros(2, 100, dtype=torch.float64)
    penalise_rows(scores.double(), Penalties(ids, counts, torch.ones(2, 3, dtype=torch.float64)))


def main() -> None:
    """Compile everything."""
    triton.runtime.driver.set_active(NoDevice())
    JITFunction.__getitem__ = compile_only  # type: ignore[method-assign]
    attention(Shape(kv_heads=8, group=4, k_dim=128, v_dim=128, dtype=BFLOAT16), AttentionForm(0.1), 3, sinks=False)
    attention(Shape(group=8, k_dim=64, v_dim=64, dtype=BFLOAT16), AttentionForm(0.1, window=128), 2, sinks=True)
    attention(Shape(k_dim=256, v_dim=256, dtype=BFLOAT16), AttentionForm(0.1, softcap=50.0), 1, sinks=False)
    attention(Shape(group=3, k_dim=64, v_dim=64, block_size=8), AttentionForm(0.1), 1, sinks=False)
    others()
    sampling()


if __name__ == "__main__":
    main()

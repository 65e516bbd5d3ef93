"""The kernels behind the model, and the choice between their versions by device.

A version is an object with the two operations that a layer calls. Eager is the reference and runs anywhere; cpu walks
the block tables with compiled loops; triton is for GPUs. A further version plugs in here.
"""

from typing import Protocol

import torch
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.cpu.native.operations import Native, new_native
from kernels.elementwise import Elementwise
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows
from kernels.paged_attention import paged_attention_eager
from kernels.store_kv import store_kv_eager


class Kernels(Protocol):
    """One version of the operations. Called from one thread at a time."""

    name: str
    native: Native | None
    """The compiled operations behind whole decoder layers and linear maps, where the version has them."""

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV, rows: PackedRows) -> None:
        """Store ``k [T, kv_heads, k_dim]`` and ``v [T, kv_heads, v_dim]`` in the slots that ``rows`` names."""

    def paged_attention(
        self, q: Tensor, kv: LayerKV, rows: PackedRows, form: AttentionForm, sinks: Tensor | None
    ) -> Tensor:
        """Attend with ``q [T, q_heads, k_dim]``; return ``[T, q_heads, v_dim]`` in the dtype of q."""


class EagerKernels:
    """Plain torch on any device: the reference."""

    name = "eager"
    native: Native | None = None

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV, rows: PackedRows) -> None:
        """See :class:`Kernels`."""
        store_kv_eager(k, v, kv, rows)

    def paged_attention(
        self, q: Tensor, kv: LayerKV, rows: PackedRows, form: AttentionForm, sinks: Tensor | None
    ) -> Tensor:
        """See :class:`Kernels`."""
        return paged_attention_eager(q, kv, rows, form, sinks)


def choose_kernels(device: torch.device, name: str = "auto") -> Kernels:
    """Return the version called ``name`` (``auto``, ``eager``, ``cpu``, ``numba`` or ``triton``) for ``device``.

    auto takes the fastest; numba is cpu without the compiled library. triton runs on a CPU only in its interpreter, for
    tests. Raises ValueError when there is no such version or it cannot run on the device.
    """
    if name == "auto":
        name = {"cpu": "cpu", "cuda": "triton"}.get(device.type, "eager")
    if name == "eager":
        return EagerKernels()
    if name in ("cpu", "numba"):
        return _cpu_kernels(device, name)
    if name == "triton":
        return _triton_kernels(device)
    raise ValueError(f"there are no kernels called {name!r}; choose auto, eager, cpu, numba or triton")


def _cpu_kernels(device: torch.device, name: str) -> Kernels:
    if device.type != "cpu":
        raise ValueError(f"the {name} kernels cannot run on {device.type}")
    from kernels.cpu.kernels import CpuKernels  # loads the compiler, which takes half a second

    return CpuKernels(new_native(torch.get_num_threads()) if name == "cpu" else None)


def _triton_kernels(device: torch.device) -> Kernels:
    from triton import knobs

    if device.type != "cuda" and not knobs.runtime.interpret:
        raise ValueError(f"the triton kernels cannot run on {device.type}, but for TRITON_INTERPRET=1")
    from kernels.gpu.kernels import TritonKernels

    return TritonKernels(device)


def choose_elementwise(device: torch.device) -> Elementwise | None:
    """Return fused operations for ``device``, or None where they gain nothing over torch's own."""
    if device.type != "cuda":
        return None
    from kernels.gpu.elementwise import TritonElementwise

    return TritonElementwise()

"""The GPU version of the kernels, in Triton.

Nothing here waits for the device or reads back from it, and launches depend on shapes only: so a decode step can be
captured in a CUDA graph and replayed on other lengths and tables.
"""

from functools import cached_property

import torch
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.cpu.native.operations import Native
from kernels.gpu.paged_attention import num_splits, paged_attention
from kernels.gpu.prefill_attention import prefill_attention
from kernels.gpu.store_kv import store_kv
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows

_INTERPRETED_PROCESSORS = 4
"""What the interpreter on a CPU pretends to have: enough that sequences are split."""


class TritonKernels:
    """Called from one thread at a time, on its current stream."""

    name = "triton"
    native: Native | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV, rows: PackedRows) -> None:
        """See :class:`kernels.select.Kernels`."""
        store_kv(_packed(k), _packed(v), kv, rows)

    def paged_attention(
        self, q: Tensor, kv: LayerKV, rows: PackedRows, form: AttentionForm, sinks: Tensor | None
    ) -> Tensor:
        """See :class:`kernels.select.Kernels`."""
        num_seqs, max_blocks = rows.block_tables.shape
        q = _packed(q)
        out = q.new_empty(q.shape[0], q.shape[1], kv.v.shape[3])
        splits = num_splits(num_seqs, kv.kv_heads, max_blocks * kv.block_size, self._num_processors)
        paged_attention(out, q, kv, rows, form, sinks, splits)
        if q.shape[0] > num_seqs:
            prefill_attention(out, q, kv, rows, form, sinks)
        return out

    @cached_property
    def _num_processors(self) -> int:
        if self._device.type == "cpu":
            return _INTERPRETED_PROCESSORS
        count: int = torch.cuda.get_device_properties(self._device).multi_processor_count
        return count


def _packed(states: Tensor) -> Tensor:
    """Return ``states`` with its last dimension contiguous."""
    return states if states.stride(-1) == 1 else states.contiguous()

"""The CPU version of the kernels: compiled loops for decode rows and cache writes, matrix products for chunks.

Decode rows go through the library of ``kernels/cpu/native`` where it was built, else through loops that numba compiles;
chunks in bfloat16 too where the processor multiplies such, else through torch's attention.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.cpu.attend_chunk import attend_chunk
from kernels.cpu.attend_rows import attend_rows
from kernels.cpu.bits import flat, flat_pool
from kernels.cpu.move import gather_keys, store_rows
from kernels.cpu.native.library import DTYPES
from kernels.cpu.native.operations import Native
from kernels.cpu.plan import Chunk, CpuPlan, LastPlan
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows

_NO_SINKS = np.empty(0, np.float32)


class _Helpers(threading.local):
    """The helpers of the calling thread, which have its priority; they end when it has ended."""

    def __init__(self, num_threads: int) -> None:
        self.pool = ThreadPoolExecutor(num_threads, "kernels")


class CpuKernels:
    """Called from one thread at a time; uses as many threads as torch does on that thread.

    Helper threads sleep while there is nothing to do, so that two workers on one machine do not take cores from each
    other.
    """

    name = "cpu"

    def __init__(self, native: Native | None) -> None:
        self.native = native
        self._num_threads = torch.get_num_threads()
        self._helpers = _Helpers(max(1, self._num_threads - 1))
        self._plans = native.plans if native is not None else LastPlan()

    def store_kv(self, k: Tensor, v: Tensor, kv: LayerKV, rows: PackedRows) -> None:
        """See :class:`kernels.select.Kernels`."""
        plan = self._plans.of(rows, kv)
        for states, view in ((k, kv.k), (v, kv.v)):
            values = flat(states.to(view.dtype).contiguous())
            store_rows(flat_pool(view), view.stride(0), kv.block_size, plan.slots, values, kv.kv_heads, states.shape[2])

    def paged_attention(
        self, q: Tensor, kv: LayerKV, rows: PackedRows, form: AttentionForm, sinks: Tensor | None
    ) -> Tensor:
        """See :class:`kernels.select.Kernels`."""
        plan = self._plans.of(rows, kv)
        if self.native is None or q.dtype not in DTYPES:
            return self._attend_by_numba(q, kv, plan, form, sinks)
        out = q.new_empty(q.shape[0], q.shape[1], kv.v.shape[3])
        if self.native.can_attend_chunk(q.dtype, kv, form):
            for chunk in plan.chunks:
                self.native.attend_chunk(q, out, kv, chunk, form, sinks)
        else:
            _attend_chunks(out, q, kv, plan, form, sinks)
        if len(plan.row_ids):
            self.native.attend(q, out, kv, plan, form, sinks)
        return out

    def _attend_by_numba(
        self, q: Tensor, kv: LayerKV, plan: CpuPlan, form: AttentionForm, sinks: Tensor | None
    ) -> Tensor:
        if not plan.chunks:
            return self._attend_rows(q, kv, plan, form, sinks).to(q.dtype)
        out = q.new_empty(q.shape[0], q.shape[1], kv.v.shape[3])
        _attend_chunks(out, q, kv, plan, form, sinks)
        if len(plan.row_ids):
            out[torch.from_numpy(plan.row_ids)] = self._attend_rows(q, kv, plan, form, sinks).to(q.dtype)
        return out

    def _attend_rows(self, q: Tensor, kv: LayerKV, plan: CpuPlan, form: AttentionForm, sinks: Tensor | None) -> Tensor:
        """Return ``[N, q_heads, v_dim]`` float32 for the rows that are attended one by one."""
        num_rows, (_, q_heads, k_dim), v_dim = len(plan.row_ids), q.shape, kv.v.shape[3]
        out = torch.empty(num_rows, q_heads * v_dim)
        arguments: tuple[Any, ...] = (
            out.numpy(),
            flat(q.contiguous()),
            flat_pool(kv.k),
            flat_pool(kv.v),
            kv.k.stride(0),
            kv.v.stride(0),
            k_dim,
            v_dim,
            q_heads,
            kv.kv_heads,
            kv.block_size,
            plan.tables,
            plan.row_ids,
            plan.sequences,
            plan.positions,
            np.float32(form.scaling),
            form.window or 0,
            form.chunk or 0,
            np.float32(form.softcap or 0),
            _NO_SINKS if sinks is None else sinks.float().numpy(),
        )
        bounds = _split(plan.positions, kv.kv_heads, self._num_threads)
        waiting = [self._helpers.pool.submit(attend_rows, *arguments, *part) for part in bounds[1:]]
        attend_rows(*arguments, *bounds[0])
        for future in waiting:
            future.result()
        return out.view(num_rows, q_heads, v_dim)


def _split(positions: NDArray[np.int64], kv_heads: int, num_threads: int) -> list[tuple[int, int]]:
    """Cut the tasks of :func:`attend_rows` into at most ``num_threads`` ranges of about equal numbers of keys."""
    num_tasks = len(positions) * kv_heads
    if num_threads == 1:
        return [(0, num_tasks)]
    keys = np.repeat(positions + 1, kv_heads).cumsum()
    cuts = np.searchsorted(keys, keys[-1] * np.arange(1, num_threads) / num_threads)
    edges = [0, *cuts.tolist(), num_tasks]
    return [(begin, end) for begin, end in pairwise(edges) if begin < end]


def _attend_chunks(
    out: Tensor, q: Tensor, kv: LayerKV, plan: CpuPlan, form: AttentionForm, sinks: Tensor | None
) -> None:
    for chunk in plan.chunks:
        out[chunk.begin : chunk.end] = _attend_chunk(q[chunk.begin : chunk.end], kv, chunk, form, sinks)


def _attend_chunk(q: Tensor, kv: LayerKV, chunk: Chunk, form: AttentionForm, sinks: Tensor | None) -> Tensor:
    """Return ``[n, q_heads, v_dim]`` for the queries ``q [n, q_heads, k_dim]`` of one sequence."""
    num_queries, q_heads, _ = q.shape
    first_key = form.first_key(chunk.position)
    num_keys = chunk.position + num_queries - first_key
    k, v = (_gather(view, chunk, first_key, num_keys) for view in (kv.k, kv.v))
    heads_first = q.transpose(0, 1).unflatten(0, (kv.kv_heads, q_heads // kv.kv_heads))
    out = attend_chunk(heads_first, k, v, chunk.position, first_key, form, sinks)
    return out.flatten(0, 1).transpose(0, 1)


def _gather(view: Tensor, chunk: Chunk, first_key: int, num_keys: int) -> Tensor:
    """Return ``[kv_heads, num_keys, dim]``, contiguous, in the pool's dtype."""
    _, kv_heads, block_size, dim = view.shape
    out = view.new_empty(kv_heads, num_keys, dim)
    gather_keys(flat(out), flat_pool(view), view.stride(0), block_size, chunk.table, first_key, kv_heads, dim)
    return out

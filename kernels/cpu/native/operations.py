"""The compiled operations on tensors.

They compute in float32 and bfloat16 on contiguous tensors, and raise MemoryError when scratch memory is short. Each
result row depends on its own input row only, bit for bit, whatever rows are computed beside it.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.cpu.native import library
from kernels.cpu.native.library import DTYPES, Cache, Form, Layer, Linear, Rows
from kernels.cpu.plan import Chunk, CpuPlan, LastPlan
from kernels.cpu.product_rule import largest_rows
from kernels.decoder_layer import LayerWeights, LinearWeights
from kernels.layer_kv import LayerKV

_MAX_CHUNK_DIM = 1024
"""MAX_DIM of ``chunk_attention.h``."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeLinear:
    """One weight matrix as the library reads it, with the tensors it points into."""

    structure: Linear
    weights: LinearWeights
    bias: Tensor | None
    """float32"""


@dataclass(frozen=True, slots=True, eq=False)
class NativeLayer:
    """One decoder layer as the library reads it, with the tensors it points into."""

    structure: Layer
    weights: LayerWeights
    linears: dict[str, NativeLinear]
    """``q``, ``k``, ``v``, ``o``, ``gate``, ``up`` and ``down``"""
    norms: dict[str, Tensor | None]
    """``attention_norm``, ``mlp_norm``, ``q_norm`` and ``k_norm``, float32"""


@dataclass(frozen=True, slots=True, eq=False)
class NativeStack:
    """Decoder layers that run one after the other, as the library reads them."""

    structures: "ctypes.Array[Layer]"
    layers: tuple[NativeLayer, ...]


def as_linear(weights: LinearWeights) -> NativeLinear:
    """Describe ``weights``, contiguous and float32 or bfloat16."""
    bias = None if weights.bias is None else weights.bias.float()
    outputs, inputs = weights.weight.shape
    return NativeLinear(Linear(weights.weight.data_ptr(), _pointer(bias), outputs, inputs), weights, bias)


def as_layer(weights: LayerWeights) -> NativeLayer:
    """Describe a decoder layer whose weights are contiguous and all float32 or all bfloat16."""
    linears = {name: as_linear(getattr(weights, name)) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    norms = {name: _float(getattr(weights, name)) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm")}
    structure = Layer(
        **{name: linear.structure for name, linear in linears.items()},
        **{name: _pointer(norm) for name, norm in norms.items()},
        form=_form(weights.form, None),
        epsilon=weights.epsilon,
        head_dim=weights.head_dim,
        q_heads=weights.q.weight.shape[0] // weights.head_dim,
        kv_heads=weights.k.weight.shape[0] // weights.head_dim,
        dtype=DTYPES[weights.q.weight.dtype],
        rotary=int(weights.rotary),
    )
    return NativeLayer(structure, weights, linears, norms)


def as_stack(layers: Sequence[NativeLayer]) -> NativeStack:
    """Describe ``layers`` that run one after the other."""
    return NativeStack((Layer * len(layers))(*(layer.structure for layer in layers)), tuple(layers))


class Native:
    """Owns a context of the library: ``num_threads - 1`` helper threads, and scratch. For one thread at a time."""

    def __init__(self, lib: ctypes.CDLL, num_threads: int) -> None:
        self._lib = lib
        self._context = lib.baton_context_new(num_threads)
        if not self._context:
            raise MemoryError(f"{num_threads} compute threads cannot be started")
        weakref.finalize(self, lib.baton_context_free, self._context)
        self.plans = LastPlan()
        self._caches: dict[LayerKV, Cache] = {}
        self._stacks: dict[tuple[LayerKV, ...], ctypes.Array[Cache]] = {}
        self._rows: tuple[CpuPlan, Rows] | None = None
        level = library.choose_level(lib) or "portable"
        self._has_pairs = level == "avx512_bf16"
        tiles = bool(lib.baton_has_tile_products())
        self._largest = {dtype: largest_rows(level, tiles, is_bfloat16=dtype == torch.bfloat16) for dtype in DTYPES}

    def is_faster(self, rows: int, dtype: torch.dtype) -> bool:
        """Return whether :meth:`linear` beats torch for so many rows."""
        return rows <= self._largest.get(dtype, 0)

    def linear(self, x: Tensor, linear: NativeLinear) -> Tensor:
        """Return ``[..., outputs]`` for ``x [..., inputs]`` in the dtype of the weights."""
        structure, rows = linear.structure, x.numel() // x.shape[-1]
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], structure.outputs)
        self._call("baton_linear", structure, DTYPES[x.dtype], x.data_ptr(), structure.inputs, out.data_ptr(), rows)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """See :class:`kernels.elementwise.Elementwise`, a plain norm; ``weight`` is float32, ``x`` contiguous."""
        out, width = torch.empty_like(x), x.shape[-1]
        rows, dtype = x.numel() // width, DTYPES[x.dtype]
        self._call("baton_norm", x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, epsilon, dtype)
        return out

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return ``silu(gate) * up``; both contiguous."""
        out, width = torch.empty_like(gate), gate.shape[-1]
        rows, dtype = gate.numel() // width, DTYPES[gate.dtype]
        self._call("baton_silu_mul", gate.data_ptr(), up.data_ptr(), width, out.data_ptr(), rows, width, dtype)
        return out

    def rotate_(self, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Turn the heads of ``x [T, heads, dim]``, contiguous, in place by ``cos`` and ``sin [T, width]``.

        What lies behind the first ``width`` elements of a head stays as it is.
        """
        rows, heads, dim = x.shape
        angles = (cos.data_ptr(), sin.data_ptr(), cos.shape[1])
        self._call("baton_rotate", x.data_ptr(), x.stride(0), heads, dim, *angles, rows, DTYPES[x.dtype])

    def attend(
        self, q: Tensor, out: Tensor, kv: LayerKV, plan: CpuPlan, form: AttentionForm, sinks: Tensor | None
    ) -> None:
        """Attend with the single rows of ``plan``, from ``q [T, q_heads, k_dim]`` into ``out [T, q_heads, v_dim]``."""
        q, sinks = q.contiguous(), _float(sinks)
        where = (self._cache(kv), self._planned(plan), _form(form, sinks))
        self._call("baton_attend", *where, q.data_ptr(), q.stride(0), q.shape[1], out.data_ptr(), DTYPES[q.dtype])

    def can_attend_chunk(self, dtype: torch.dtype, kv: LayerKV, form: AttentionForm) -> bool:
        """Whether :meth:`attend_chunk` takes queries of ``dtype``."""
        is_bfloat16 = dtype == kv.k.dtype == kv.v.dtype == torch.bfloat16
        k_dim, v_dim = kv.k.shape[3], kv.v.shape[3]
        fits = k_dim % 2 == 0 and max(k_dim, v_dim) <= _MAX_CHUNK_DIM
        return self._has_pairs and is_bfloat16 and form.softcap is None and fits

    def attend_chunk(
        self, q: Tensor, out: Tensor, kv: LayerKV, chunk: Chunk, form: AttentionForm, sinks: Tensor | None
    ) -> None:
        """Attend with the rows of ``chunk``, from ``q [T, q_heads, k_dim]`` into ``out [T, q_heads, v_dim]``."""
        q, sinks, table = q[chunk.begin : chunk.end].contiguous(), _float(sinks), np.ascontiguousarray(chunk.table)
        where = (self._cache(kv), _form(form, sinks), table.ctypes.data, q.data_ptr(), q.shape[1])
        self._call("baton_attend_chunk", *where, out[chunk.begin].data_ptr(), len(q), chunk.position)

    def can_run_layers(self, stack: NativeStack, caches: Sequence[LayerKV], plan: CpuPlan, dtype: torch.dtype) -> bool:
        """Whether :meth:`decoder_layers` takes the step of ``plan``, and is the faster way."""
        if not self.is_faster(len(plan.slots), dtype):
            return False
        forms = (layer.weights.form for layer in stack.layers)
        return not plan.chunks or all(map(self.can_attend_chunk, repeat(dtype), caches, forms))

    def decoder_layers(
        self, stack: NativeStack, x: Tensor, cos: Tensor, sin: Tensor, caches: Sequence[LayerKV], plan: CpuPlan
    ) -> Tensor:
        """Run all layers of ``stack``, each as :func:`kernels.decoder_layer.decoder_layer_eager` does.

        All tensors are contiguous; see :meth:`can_run_layers`.
        """
        out = x.clone()
        where = (stack.structures, self._stacked(tuple(caches)), len(caches), self._planned(plan))
        self._call("baton_layers", *where, out.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[-1])
        return out

    def layer_kv(self, layer: NativeLayer, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerKV, plan: CpuPlan) -> None:
        """Store keys and values as :meth:`decoder_layers` does for a layer, bit for bit, and compute nothing else."""
        where = (layer.structure, self._cache(cache), self._planned(plan))
        self._call("baton_layer_kv", *where, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), cos.shape[-1])

    def _cache(self, kv: LayerKV) -> Cache:
        """Return ``kv`` as the library reads it; there is one a layer, so they are kept."""
        known = self._caches.get(kv)
        if known is None:
            known = self._caches[kv] = _cache(kv)
        return known

    def _stacked(self, caches: tuple[LayerKV, ...]) -> "ctypes.Array[Cache]":
        """Return ``caches`` behind each other; a model has one stack of them, or few, so they are kept."""
        known = self._stacks.get(caches)
        if known is None:
            known = self._stacks[caches] = (Cache * len(caches))(*map(_cache, caches))
        return known

    def _planned(self, plan: CpuPlan) -> Rows:
        """Return ``plan`` as the library reads it; all layers of a step come with the same one."""
        if self._rows is None or self._rows[0] is not plan:
            self._rows = (plan, _rows(plan))
        return self._rows[1]

    def _call(self, name: str, *arguments: Any) -> None:
        if getattr(self._lib, name)(self._context, *arguments):
            raise MemoryError("no memory for the scratch of a compiled kernel")


def new_native(num_threads: int) -> Native | None:
    """Return the compiled operations with ``num_threads`` threads, or None where the library is not there."""
    lib = library.load_library()
    return Native(lib, num_threads) if lib is not None else None


def _cache(kv: LayerKV) -> Cache:
    return Cache(
        kv.k.data_ptr(),
        kv.v.data_ptr(),
        kv.k.stride(0),
        kv.v.stride(0),
        kv.k.shape[3],
        kv.v.shape[3],
        kv.kv_heads,
        kv.block_size,
        DTYPES[kv.k.dtype],
    )


def _rows(plan: CpuPlan) -> Rows:
    """Describe ``plan``, which must live as long."""
    arrays = (plan.row_ids, plan.sequences, plan.positions, plan.slots, plan.tables)
    assert all(array.flags.c_contiguous for array in arrays)
    chunks = (library.Chunk * len(plan.chunks))(*map(_chunk, plan.chunks))
    where = (array.ctypes.data for array in arrays)
    return Rows(len(plan.slots), len(chunks), chunks, len(plan.row_ids), *where, plan.tables.shape[1])


def _chunk(chunk: Chunk) -> library.Chunk:
    assert chunk.table.flags.c_contiguous
    return library.Chunk(chunk.begin, chunk.end - chunk.begin, chunk.position, chunk.table.ctypes.data)


def _form(form: AttentionForm, sinks: Tensor | None) -> Form:
    return Form(form.scaling, form.softcap or 0.0, form.window or 0, form.chunk or 0, _pointer(sinks))


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()

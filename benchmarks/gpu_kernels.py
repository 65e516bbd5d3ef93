"""Each Triton kernel on one layer of Llama-3-8B, checked and timed against its floor and torch's own.

Decode attention, cache writes and block moves are bound by bytes, prefill attention by operations. Torch's attention
reads keys and values that lie contiguously, and every figure is for the same numbers.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_timing import DEVICE, Ceilings, device_seconds, normal
from kernels.attention_form import AttentionForm
from kernels.elementwise import EagerElementwise
from kernels.gpu import move_blocks
from kernels.gpu.elementwise import TritonElementwise
from kernels.gpu.kernels import TritonKernels
from kernels.gpu.paged_attention import DecodeTile, num_splits, paged_attention
from kernels.gpu.prefill_attention import PrefillTile, prefill_attention
from kernels.layer_kv import LayerKV
from kernels.norm_form import NormForm
from kernels.packed_rows import PackedRows

Q_HEADS, KV_HEADS, DIM = 32, 8, 128
BLOCK_SIZE = 16
HIDDEN, INTERMEDIATE = 4096, 14336
FORM = AttentionForm(DIM**-0.5)
TOLERANCE = 0.02

DECODES = ((64, 2000), (1, 8000), (16, 8000), (256, 512))
"""Sequences and their keys."""
PREFILLS = ((1, 8000, 8000), (4, 2000, 2000), (1, 512, 8000))
"""Sequences, their queries and keys: whole prompts, and a chunk behind a cached prefix."""

DECODE_TILES = [DecodeTile(n, warps, stages) for n in (32, 64, 128) for warps in (4, 8) for stages in (3, 5)]
PREFILL_TILES = [PrefillTile(m, n, 8, stages) for m in (64, 128) for n in (32, 64, 128) for stages in (2, 3)]


@dataclass(frozen=True, slots=True)
class KernelFigure:
    """One line of the table."""

    name: str
    seconds: float
    floor_s: float
    sdpa_s: float | None = None
    flex_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """Sequences of one length in a paged pool, in shuffled blocks, and the same numbers contiguously."""

    q: Tensor
    """``[S * queries, Q_HEADS, DIM]``"""
    kv: LayerKV
    rows: PackedRows
    k: Tensor
    """``[S, KV_HEADS, keys, DIM]``"""
    v: Tensor

    @property
    def kv_bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()


def new_layer(num_seqs: int, num_queries: int, num_keys: int) -> Layer:
    """Return random sequences."""
    each = -(-num_keys // BLOCK_SIZE)
    pool = normal(num_seqs * each, 2, KV_HEADS, BLOCK_SIZE, DIM)
    order = torch.randperm(num_seqs * each, device=DEVICE).int().view(num_seqs, each)
    contiguous = [
        pool[order.long(), part].transpose(1, 2).reshape(num_seqs, KV_HEADS, each * BLOCK_SIZE, DIM)[:, :, :num_keys]
        for part in range(2)
    ]
    positions = torch.arange(num_keys - num_queries, num_keys, device=DEVICE)
    slots = order[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    rows = PackedRows(
        cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=DEVICE) * num_queries,
        seq_lens=torch.full((num_seqs,), num_keys, dtype=torch.int32, device=DEVICE),
        block_tables=order,
        slot_mapping=slots.flatten(),
    )
    q = normal(num_seqs * num_queries, Q_HEADS, DIM)
    k, v = (part.contiguous() for part in contiguous)
    return Layer(q, LayerKV(pool[:, 0], pool[:, 1]), rows, k, v)


def measure(ceilings: Ceilings) -> Iterator[Callable[[], KernelFigure]]:
    """Yield the measurements, each of which checks its result first."""
    for decode in DECODES:
        yield lambda shape=decode: _decode(ceilings, *shape)  # type: ignore[misc]
    for prefill in PREFILLS:
        yield lambda shape=prefill: _prefill(ceilings, *shape)  # type: ignore[misc]
    yield lambda: _store(ceilings)
    yield from (lambda name=name: _move(ceilings, name) for name in ("gather", "scatter", "copy"))
    yield lambda: _elementwise(ceilings, "rms_norm")
    yield lambda: _elementwise(ceilings, "rotary")
    yield lambda: _elementwise(ceilings, "silu_mul")


def _decode(ceilings: Ceilings, num_seqs: int, num_keys: int) -> KernelFigure:
    layer, kernels = new_layer(num_seqs, 1, num_keys), TritonKernels(DEVICE)
    q = layer.q[:, :, None]  # [S, Q_HEADS, 1, DIM]

    def ours() -> Tensor:
        return kernels.paged_attention(layer.q, layer.kv, layer.rows, FORM, None)

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(q, layer.k, layer.v, enable_gqa=True)

    _check(ours(), sdpa()[:, :, 0])
    return KernelFigure(
        f"paged_attention {num_seqs} x {num_keys}",
        device_seconds(ours),
        ceilings.floor_s(layer.kv_bytes),
        device_seconds(sdpa),
        _flex_seconds(q, layer.k, layer.v, causal=False),
    )


def _prefill(ceilings: Ceilings, num_seqs: int, num_queries: int, num_keys: int) -> KernelFigure:
    layer, kernels = new_layer(num_seqs, num_queries, num_keys), TritonKernels(DEVICE)
    q = layer.q.view(num_seqs, num_queries, Q_HEADS, DIM).transpose(1, 2).contiguous()
    whole = num_queries == num_keys
    visible = (
        None
        if whole
        else torch.ones(num_queries, num_keys, dtype=torch.bool, device=DEVICE).tril(num_keys - num_queries)
    )

    def ours() -> Tensor:
        return kernels.paged_attention(layer.q, layer.kv, layer.rows, FORM, None)

    def sdpa() -> Tensor:
        return scaled_dot_product_attention(q, layer.k, layer.v, visible, is_causal=whole, enable_gqa=True)

    _check(ours(), sdpa().transpose(1, 2).flatten(0, 1))
    pairs = num_queries * (num_keys - (num_queries - 1) / 2)
    return KernelFigure(
        f"prefill_attention {num_seqs} x {num_queries} of {num_keys}",
        device_seconds(ours),
        ceilings.floor_s(layer.kv_bytes, 4 * num_seqs * Q_HEADS * DIM * pairs),
        device_seconds(sdpa),
        _flex_seconds(q, layer.k, layer.v, causal=True),
    )


def _flex_seconds(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> float | None:
    """Return the time of compiled FlexAttention, or None where it cannot be compiled."""
    offset = k.shape[2] - q.shape[2]
    mask = None
    try:
        if causal:
            mask = create_block_mask(
                lambda b, h, i, j: i + offset >= j, None, None, q.shape[2], k.shape[2], device=DEVICE
            )
        return device_seconds(lambda: _flex()(q, k, v, block_mask=mask, enable_gqa=True))
    except Exception:  # noqa: BLE001 - a peer that fails is a missing figure
        return None


@cache
def _flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _store(ceilings: Ceilings) -> KernelFigure:
    layer, kernels = new_layer(1, 8000, 8000), TritonKernels(DEVICE)
    k, v = (normal(8000, KV_HEADS, DIM) for _ in range(2))
    kernels.store_kv(k, v, layer.kv, layer.rows)
    slots = layer.rows.slot_mapping
    _check(layer.kv.k[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE], k)
    seconds = device_seconds(lambda: kernels.store_kv(k, v, layer.kv, layer.rows))
    return KernelFigure("store_kv 8000", seconds, ceilings.floor_s(2 * layer.kv_bytes))


def _move(ceilings: Ceilings, name: str) -> KernelFigure:
    pool, staging = normal(512, 2**20), normal(128, 2**20)  # blocks of 2 MiB
    ids = torch.randperm(512, device=DEVICE)
    moves: dict[str, Callable[[], None]] = {
        "gather": lambda: move_blocks.gather_blocks(pool, ids[:128], staging),
        "scatter": lambda: move_blocks.scatter_blocks(staging, pool, ids[:128]),
        "copy": lambda: move_blocks.copy_blocks(pool, ids[:128], ids[128:256]),
    }
    moves[name]()
    _check(pool[ids[:128]], pool[ids[128:256]] if name == "copy" else staging)
    num_bytes = 2 * staging.numel() * staging.element_size()
    return KernelFigure(f"{name}_blocks 128 x 2 MiB", device_seconds(moves[name]), ceilings.floor_s(num_bytes))


def _elementwise(ceilings: Ceilings, name: str) -> KernelFigure:
    """Measure one of :class:`kernels.elementwise.Elementwise` on the rows of a prompt."""
    x, gate_up = normal(1, 8000, HIDDEN), normal(1, 8000, 2 * INTERMEDIATE)
    q = x.view(1, 8000, Q_HEADS, DIM).transpose(1, 2)
    k, cos, sin = q[:, :KV_HEADS], *normal(2, 1, 8000, DIM)
    calls: dict[str, tuple[tuple[Any, ...], float]] = {
        "rms_norm": ((x, x[0, 0], NormForm(1e-5)), 2 * x.numel()),
        "rotary": ((q, k, cos, sin), 2 * (q.numel() + k.numel()) + 2 * cos.numel()),
        "silu_mul": ((gate_up,), 1.5 * gate_up.numel()),
    }
    arguments, elements = calls[name]
    fused, eager = getattr(TritonElementwise(), name), getattr(EagerElementwise(), name)
    for actual, expected in zip(fused(*arguments), eager(*arguments), strict=True):
        _check(actual, expected)
    return KernelFigure(f"{name} 8000", device_seconds(lambda: fused(*arguments)), ceilings.floor_s(2 * elements))


def sweep() -> Iterator[tuple[str, float]]:
    """Yield other tiles of the two attention kernels and their times at the sizes that count most."""
    layer = new_layer(64, 1, 2000)
    out = torch.empty_like(layer.q)
    splits = num_splits(64, KV_HEADS, 2048, torch.cuda.get_device_properties(0).multi_processor_count)
    for tile in DECODE_TILES:
        for count in (1, splits, 2 * splits):
            yield (
                f"{tile} splits={count}",
                _tried(
                    lambda t=tile, c=count: paged_attention(out, layer.q, layer.kv, layer.rows, FORM, None, c, t)  # type: ignore[misc]
                ),
            )
    layer = new_layer(1, 8000, 8000)
    out = torch.empty_like(layer.q)
    for prefill_tile in PREFILL_TILES:
        yield (
            str(prefill_tile),
            _tried(
                lambda t=prefill_tile: prefill_attention(out, layer.q, layer.kv, layer.rows, FORM, None, t)  # type: ignore[misc]
            ),
        )


def _tried(run: Callable[[], None]) -> float:
    """Return the time of ``run``, infinite when the tile does not fit the device."""
    try:
        return device_seconds(run)
    except Exception:  # noqa: BLE001 - out of shared memory, which is what a sweep is for
        return float("inf")


def _check(actual: Tensor, expected: Tensor) -> None:
    """Raise when the two differ by more than rounding."""
    error = float((actual.float() - expected.float()).norm() / expected.float().norm())
    if not error <= TOLERANCE:
        raise ArithmeticError(f"the result is off by {error:.3g}, more than {TOLERANCE}")

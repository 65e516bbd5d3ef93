"""Attention of chunks: many queries of a sequence over its earlier keys, which are read through the block table.

One program holds a tile of queries under all query heads that share a kv head and walks over the keys they see:
FlashAttention's forward pass on paged keys. Grid ``[tiles, kv_heads]``, where ``tiles`` bounds the tiles of all
sequences from shapes alone: sequence s begins at tile ``cu_seqlens_q[s] // queries + s``, and what lies past its end
does nothing. So nothing has to come back from the device before the launch. Long tiles, the last of a chunk, go first.
Sequences with at most ``LONGEST_ROW`` queries are left to :mod:`kernels.gpu.paged_attention`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.gpu.attend_keys import LOG2_E, attend_keys, first_key
from kernels.gpu.paged_attention import LONGEST_ROW
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows


@triton.jit(do_not_specialize=["stride_table", "num_seqs"])  # they change from step to step
def _prefill_attention_kernel(
    out,  # [T, q_heads, V_DIM]
    q,  # [T, q_heads, K_DIM]
    k,  # [num_blocks, kv_heads, BLOCK_SIZE, K_DIM]
    v,  # [num_blocks, kv_heads, BLOCK_SIZE, V_DIM]
    tables,  # [S, max_blocks] int32
    cu_seqlens_q,  # [S + 1] int32
    seq_lens,  # [S] int32
    sinks,  # [q_heads], unused without HAS_SINKS
    stride_q_row,
    stride_q_head,
    stride_k,
    stride_v,
    stride_table,
    q_heads,
    num_seqs,
    scaling,
    GROUP: tl.constexpr,
    SHORTEST: tl.constexpr,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    seq = _find_sequence(cu_seqlens_q, tile, num_seqs, QUERIES)
    row_begin = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - row_begin
    query_begin = (tile - (row_begin // QUERIES + seq)) * QUERIES
    if (num_queries < SHORTEST) | (query_begin >= num_queries):
        return

    tile_row = tl.arange(0, ROWS)
    query = query_begin + tile_row // GROUP
    head = kv_head * GROUP + tile_row % GROUP
    valid = (query < num_queries) & (tile_row < QUERIES * GROUP)
    row = (row_begin + query).to(tl.int64)
    columns = tl.arange(0, K_PAD)
    q_pointers = q + (row * stride_q_row + head * stride_q_head)[:, None] + columns[None, :]
    q_tile = tl.load(q_pointers, mask=valid[:, None] & (columns < K_DIM)[None, :], other=0.0)

    first_position = tl.load(seq_lens + seq) - num_queries + query_begin
    positions = first_position + tile_row // GROUP
    table = tables + seq.to(tl.int64) * stride_table
    k_head = k + kv_head * BLOCK_SIZE * K_DIM
    v_head = v + kv_head * BLOCK_SIZE * V_DIM
    begin = first_key(first_position, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    end = first_position + tl.minimum(num_queries - query_begin, QUERIES)

    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if WINDOW == 0 and CHUNK == 0:  # what every row of the tile sees needs no mask
        seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
        acc, m, total = attend_keys(
            q_tile,
            acc,
            m,
            total,
            begin,
            seen_by_all,
            positions,
            table,
            k_head,
            v_head,
            stride_k,
            stride_v,
            scaling,
            K_DIM,
            V_DIM,
            K_PAD,
            V_PAD,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
            CHUNK,
            SOFTCAP,
            False,
        )
        begin = seen_by_all
    acc, m, total = attend_keys(
        q_tile,
        acc,
        m,
        total,
        begin,
        end,
        positions,
        table,
        k_head,
        v_head,
        stride_k,
        stride_v,
        scaling,
        K_DIM,
        V_DIM,
        K_PAD,
        V_PAD,
        BLOCK_SIZE,
        BLOCK_N,
        WINDOW,
        CHUNK,
        SOFTCAP,
        True,
    )

    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
        base = tl.maximum(m, sink)
        acc = acc * tl.exp2(m - base)[:, None]
        total = total * tl.exp2(m - base) + tl.exp2(sink - base)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_columns = tl.arange(0, V_PAD)
    pointers = out + ((row * q_heads + head) * V_DIM)[:, None] + out_columns[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=valid[:, None] & (out_columns < V_DIM)[None, :])


@triton.jit
def _find_sequence(cu_seqlens_q, tile, num_seqs, QUERIES: tl.constexpr):
    """Return the last sequence that begins at or before ``tile``, by bisection."""
    low = tile * 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_q + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class PrefillTile:
    """What one program holds and how it walks over keys."""

    rows: int
    """Queries times the heads that share keys."""
    keys: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, dtype: torch.dtype, dim: int) -> "PrefillTile":
        """Return the tile for keys and values of ``dtype``, padded to ``dim`` elements."""
        if dtype == torch.float32:
            return cls(rows=32 if dim <= 128 else 16, keys=32, num_warps=4, num_stages=2)
        if dim > 128:
            return cls(rows=128, keys=32, num_warps=8, num_stages=2)
        return cls(rows=128, keys=64, num_warps=8, num_stages=3)


def prefill_attention(
    out: Tensor,
    q: Tensor,
    kv: LayerKV,
    rows: PackedRows,
    form: AttentionForm,
    sinks: Tensor | None,
    tile: PrefillTile | None = None,
) -> None:
    """Fill ``out [T, q_heads, v_dim]`` for the sequences with more than ``LONGEST_ROW`` queries.

    ``q [T, q_heads, k_dim]`` is contiguous in its last dimension, ``out`` in all.
    ``tile`` is for measuring others than the default.
    """
    num_rows, q_heads, k_dim = q.shape
    v_dim, group, num_seqs = kv.v.shape[3], q_heads // kv.kv_heads, rows.seq_lens.shape[0]
    k_pad, v_pad = (max(16, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    tile = tile or PrefillTile.of(kv.k.dtype, max(k_pad, v_pad))
    tile_rows = max(tile.rows, triton.next_power_of_2(group))
    grid = (num_rows // (tile_rows // group) + num_seqs, kv.kv_heads)
    _prefill_attention_kernel[grid](
        out,
        q,
        kv.k,
        kv.v,
        rows.block_tables,
        rows.cu_seqlens_q,
        rows.seq_lens,
        q if sinks is None else sinks,
        q.stride(0),
        q.stride(1),
        kv.k.stride(0),
        kv.v.stride(0),
        rows.block_tables.stride(0),
        q_heads,
        num_seqs,
        form.scaling,
        GROUP=group,
        SHORTEST=LONGEST_ROW + 1,
        ROWS=tile_rows,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_PAD=k_pad,
        V_PAD=v_pad,
        BLOCK_SIZE=kv.block_size,
        BLOCK_N=tile.keys,
        WINDOW=form.window or 0,
        CHUNK=form.chunk or 0,
        SOFTCAP=form.softcap or 0.0,
        HAS_SINKS=sinks is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )

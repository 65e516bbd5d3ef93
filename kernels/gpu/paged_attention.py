"""Attention of sequences with one or few queries: the decode path, bound by reading keys and values once.

One program attends all query heads that share a kv head, over one split of the sequence's keys (Flash-Decoding, Dao et
al., 2023); a second kernel joins the splits. Grid ``[S, kv_heads, splits]``, then ``[S, q_heads, queries]``. The number
of splits comes from shapes alone, so a captured graph serves every length: a program without keys writes "nothing
seen". Sequences with more than ``LONGEST_ROW`` queries are left to :mod:`kernels.gpu.prefill_attention`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.gpu.attend_keys import LOG2_E, attend_keys, first_key
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows

LONGEST_ROW = 4
"""A sequence with at most this many queries is attended here."""

_LEAST_ROWS = 16
"""The smallest side of a tile that tensor cores take."""

_PROGRAMS_PER_PROCESSOR = 8
"""Splits are made until so many programs wait for each multiprocessor: uneven lengths then even out."""

_LEAST_SPLIT = 256
"""Keys below which another split costs more than it spreads."""

_MAX_SPLITS = 64


@triton.jit(do_not_specialize=["stride_table"])  # it changes from step to step
def _paged_attention_kernel(
    out,  # [T, q_heads, splits, V_DIM] float32, or [T, q_heads, V_DIM] in q's dtype without splits
    sums,  # [T, q_heads, splits] float32: log2 of each split's sum
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
    scaling,
    GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    row_begin = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - row_begin
    if (num_queries < 1) | (num_queries > MAX_QUERIES):
        return
    seq_len = tl.load(seq_lens + seq)
    first = first_key(seq_len - num_queries, WINDOW, CHUNK) // BLOCK_N * BLOCK_N
    split_len = tl.cdiv(tl.cdiv(seq_len - first, splits), BLOCK_N) * BLOCK_N
    begin = first + split * split_len
    end = tl.minimum(begin + split_len, seq_len)

    tile_row = tl.arange(0, ROWS)
    query = tile_row // GROUP
    head = kv_head * GROUP + tile_row % GROUP
    valid = query < num_queries
    row = (row_begin + query).to(tl.int64)
    columns = tl.arange(0, K_PAD)
    q_pointers = q + (row * stride_q_row + head * stride_q_head)[:, None] + columns[None, :]
    q_tile = tl.load(q_pointers, mask=valid[:, None] & (columns < K_DIM)[None, :], other=0.0)

    acc = tl.zeros([ROWS, V_PAD], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc, m, total = attend_keys(
        q_tile,
        acc,
        m,
        total,
        begin,
        end,
        seq_len - num_queries + query,
        tables + seq.to(tl.int64) * stride_table,
        k + kv_head * BLOCK_SIZE * K_DIM,
        v + kv_head * BLOCK_SIZE * V_DIM,
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

    out_row = row * q_heads + head
    out_columns = tl.arange(0, V_PAD)
    out_mask = valid[:, None] & (out_columns < V_DIM)[None, :]
    if IS_SPLIT:
        total = tl.where(total > 0, total, 1.0)
        pointers = out + ((out_row * splits + split) * V_DIM)[:, None] + out_columns[None, :]
        tl.store(pointers, acc / total[:, None], mask=out_mask)
        tl.store(sums + out_row * splits + split, m + tl.log2(total), mask=valid)  # -inf when nothing was seen
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * LOG2_E
            base = tl.maximum(m, sink)
            acc = acc * tl.exp2(m - base)[:, None]
            total = total * tl.exp2(m - base) + tl.exp2(sink - base)
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        pointers = out + (out_row * V_DIM)[:, None] + out_columns[None, :]
        tl.store(pointers, result.to(out.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["splits"])
def _join_splits_kernel(
    out,  # [T, q_heads, V_DIM]
    parts,  # [T, q_heads, splits, V_DIM] float32
    sums,  # [T, q_heads, splits] float32
    cu_seqlens_q,  # [S + 1] int32
    sinks,  # [q_heads], unused without HAS_SINKS
    q_heads,
    splits,
    MAX_QUERIES: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    seq = tl.program_id(0)
    head = tl.program_id(1)
    query = tl.program_id(2)
    row_begin = tl.load(cu_seqlens_q + seq)
    num_queries = tl.load(cu_seqlens_q + seq + 1) - row_begin
    if (query >= num_queries) | (num_queries > MAX_QUERIES):
        return
    row = (row_begin + query).to(tl.int64) * q_heads + head
    split = tl.arange(0, MAX_SPLITS)
    columns = tl.arange(0, V_PAD)
    logs = tl.load(sums + row * splits + split, mask=split < splits, other=float("-inf"))
    base = tl.max(logs, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    shares = tl.exp2(logs - base)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    pointers = parts + ((row * splits + split) * V_DIM)[:, None] + columns[None, :]
    tile = tl.load(pointers, mask=(split < splits)[:, None] & (columns < V_DIM)[None, :], other=0.0)
    result = tl.sum(tile * shares[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + row * V_DIM + columns, result.to(out.dtype.element_ty), mask=columns < V_DIM)


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """How one program walks over keys."""

    keys: int
    """Keys in one turn of its loop."""
    num_warps: int
    num_stages: int
    """Turns whose loads overlap; the block table is read one ahead, so 5 keep two tiles of keys in flight."""

    @classmethod
    def of(cls, dtype: torch.dtype, dim: int, rows: int) -> "DecodeTile":
        """Return the tile for keys and values of ``dtype``, padded to ``dim`` elements, and ``rows`` query rows."""
        if dtype == torch.float32:
            return cls(keys=32, num_warps=8 if rows >= 64 else 4, num_stages=2)
        return cls(keys=64 if dim <= 128 else 32, num_warps=4, num_stages=5)


def num_splits(num_seqs: int, kv_heads: int, max_keys: int, num_processors: int) -> int:
    """Return into how many parts each sequence's keys are cut; ``max_keys`` is what a block table can hold."""
    wanted = -(-num_processors * _PROGRAMS_PER_PROCESSOR // (num_seqs * kv_heads))
    return max(1, min(wanted, max_keys // _LEAST_SPLIT, _MAX_SPLITS))


def paged_attention(
    out: Tensor,
    q: Tensor,
    kv: LayerKV,
    rows: PackedRows,
    form: AttentionForm,
    sinks: Tensor | None,
    splits: int,
    tile: DecodeTile | None = None,
) -> None:
    """Fill ``out [T, q_heads, v_dim]`` for the sequences with at most ``LONGEST_ROW`` queries.

    ``q [T, q_heads, k_dim]`` is contiguous in its last dimension, ``out`` in all. When T is the number of sequences,
    each is taken to have one query. ``tile`` is for measuring others than the default.
    """
    num_rows, q_heads, k_dim = q.shape
    v_dim, group, num_seqs = kv.v.shape[3], q_heads // kv.kv_heads, rows.seq_lens.shape[0]
    max_queries = 1 if num_rows == num_seqs else LONGEST_ROW
    k_pad, v_pad = (max(_LEAST_ROWS, triton.next_power_of_2(dim)) for dim in (k_dim, v_dim))
    tile_rows = max(_LEAST_ROWS, triton.next_power_of_2(max_queries * group))
    tile = tile or DecodeTile.of(kv.k.dtype, max(k_pad, v_pad), tile_rows)
    parts, sums = out, out
    if splits > 1:
        parts = torch.empty(num_rows, q_heads, splits, v_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(num_rows, q_heads, splits, dtype=torch.float32, device=q.device)
    _paged_attention_kernel[(num_seqs, kv.kv_heads, splits)](
        parts,
        sums,
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
        form.scaling,
        GROUP=group,
        MAX_QUERIES=max_queries,
        ROWS=tile_rows,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_PAD=k_pad,
        V_PAD=v_pad,
        BLOCK_SIZE=kv.block_size,
        BLOCK_N=tile.keys,
        IS_SPLIT=splits > 1,
        WINDOW=form.window or 0,
        CHUNK=form.chunk or 0,
        SOFTCAP=form.softcap or 0.0,
        HAS_SINKS=sinks is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if splits > 1:
        _join_splits_kernel[(num_seqs, q_heads, max_queries)](
            out,
            parts,
            sums,
            rows.cu_seqlens_q,
            q if sinks is None else sinks,
            q_heads,
            splits,
            MAX_QUERIES=max_queries,
            V_DIM=v_dim,
            V_PAD=v_pad,
            MAX_SPLITS=_MAX_SPLITS,
            HAS_SINKS=sinks is not None,
            num_warps=4,
        )

"""Write the keys and values of one step into their slots: ``pool[slot_mapping[t]] = kv[t]``, -1 is skipped.

One program a token and a few heads; grid ``[T, head tiles]``.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows

_HEADS = 8


@triton.jit
def _store_kv_kernel(
    k,  # [T, kv_heads, K_DIM]
    v,  # [T, kv_heads, V_DIM]
    k_pool,  # [num_blocks, kv_heads, BLOCK_SIZE, K_DIM]
    v_pool,  # [num_blocks, kv_heads, BLOCK_SIZE, V_DIM]
    slots,  # [T] int64
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_k_block,
    stride_v_block,
    kv_heads,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    block_id = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    valid = head < kv_heads
    k_column = tl.arange(0, K_PAD)
    k_mask = valid[:, None] & (k_column < K_DIM)[None, :]
    k_tile = tl.load(k + (row * stride_k_row + head * stride_k_head)[:, None] + k_column[None, :], mask=k_mask)
    k_target = k_pool + block_id * stride_k_block + ((head * BLOCK_SIZE + offset) * K_DIM)[:, None] + k_column[None, :]
    tl.store(k_target, k_tile.to(k_pool.dtype.element_ty), mask=k_mask)
    v_column = tl.arange(0, V_PAD)
    v_mask = valid[:, None] & (v_column < V_DIM)[None, :]
    v_tile = tl.load(v + (row * stride_v_row + head * stride_v_head)[:, None] + v_column[None, :], mask=v_mask)
    v_target = v_pool + block_id * stride_v_block + ((head * BLOCK_SIZE + offset) * V_DIM)[:, None] + v_column[None, :]
    tl.store(v_target, v_tile.to(v_pool.dtype.element_ty), mask=v_mask)


def store_kv(k: Tensor, v: Tensor, kv: LayerKV, rows: PackedRows) -> None:
    """Store ``k [T, kv_heads, k_dim]`` and ``v [T, kv_heads, v_dim]``, each contiguous in its last dimension."""
    num_rows, kv_heads, k_dim = k.shape
    v_dim = v.shape[2]
    heads = min(_HEADS, triton.next_power_of_2(kv_heads))
    _store_kv_kernel[(num_rows, triton.cdiv(kv_heads, heads))](
        k,
        v,
        kv.k,
        kv.v,
        rows.slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        kv.k.stride(0),
        kv.v.stride(0),
        kv_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        K_PAD=triton.next_power_of_2(k_dim),
        V_PAD=triton.next_power_of_2(v_dim),
        BLOCK_SIZE=kv.block_size,
        HEADS=heads,
        num_warps=2,
    )

"""Rotary positions: ``out = x * cos + half_turned(x) * sin``, ``half_turned([a, b]) = [-b, a]``; in float32.

One program a token, and one each for its queries and its keys. Grid ``[T, 2]``.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn(
    out,  # [T, heads, 2 * HALF]
    x,  # [T, heads, 2 * HALF]
    row,
    stride_row,
    stride_head,
    heads,
    cos_first,  # [HALF_PAD] float32
    cos_second,
    sin_first,
    sin_second,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    head = tl.arange(0, HEADS)
    column = tl.arange(0, HALF_PAD)
    mask = (head < heads)[:, None] & (column < HALF)[None, :]
    source = x + row * stride_row + (head * stride_head)[:, None] + column[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=mask, other=0.0).to(tl.float32)
    target = out + row * heads * (2 * HALF) + (head * (2 * HALF))[:, None] + column[None, :]
    turned_first = first * cos_first[None, :] - second * sin_first[None, :]
    turned_second = second * cos_second[None, :] + first * sin_second[None, :]
    tl.store(target, turned_first.to(out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, turned_second.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotary_kernel(
    q_out,  # [T, q_heads, 2 * HALF]
    k_out,  # [T, k_heads, 2 * HALF]
    q,  # [T, q_heads, 2 * HALF]
    k,  # [T, k_heads, 2 * HALF]
    cos,  # [T, 2 * HALF]
    sin,  # [T, 2 * HALF]
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_cos,
    stride_sin,
    q_heads,
    k_heads,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF_PAD)
    mask = column < HALF
    cos_first = tl.load(cos + row * stride_cos + column, mask=mask, other=0.0).to(tl.float32)
    cos_second = tl.load(cos + row * stride_cos + HALF + column, mask=mask, other=0.0).to(tl.float32)
    sin_first = tl.load(sin + row * stride_sin + column, mask=mask, other=0.0).to(tl.float32)
    sin_second = tl.load(sin + row * stride_sin + HALF + column, mask=mask, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        _turn(
            q_out,
            q,
            row,
            stride_q_row,
            stride_q_head,
            q_heads,
            cos_first,
            cos_second,
            sin_first,
            sin_second,
            Q_HEADS,
            HALF,
            HALF_PAD,
        )
    else:
        _turn(
            k_out,
            k,
            row,
            stride_k_row,
            stride_k_head,
            k_heads,
            cos_first,
            cos_second,
            sin_first,
            sin_second,
            K_HEADS,
            HALF,
            HALF_PAD,
        )


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn ``q [1, q_heads, T, dim]`` and ``k [1, k_heads, T, dim]`` by ``cos`` and ``sin [1, T, dim]``.

    Returns new tensors of the same shapes, in which a token's heads lie together.
    """
    q_rows, k_rows = (_rows(states) for states in (q, k))
    num_rows, q_heads, dim = q_rows.shape
    k_heads = k_rows.shape[1]
    q_out, k_out = q.new_empty(num_rows, q_heads, dim), k.new_empty(num_rows, k_heads, dim)
    cos, sin = (table[0] if table.stride(-1) == 1 else table[0].contiguous() for table in (cos, sin))
    _rotary_kernel[(num_rows, 2)](
        q_out,
        k_out,
        q_rows,
        k_rows,
        cos,
        sin,
        q_rows.stride(0),
        q_rows.stride(1),
        k_rows.stride(0),
        k_rows.stride(1),
        cos.stride(0),
        sin.stride(0),
        q_heads,
        k_heads,
        Q_HEADS=triton.next_power_of_2(q_heads),
        K_HEADS=triton.next_power_of_2(k_heads),
        HALF=dim // 2,
        HALF_PAD=triton.next_power_of_2(dim // 2),
        num_warps=4,
    )
    return q_out.transpose(0, 1)[None], k_out.transpose(0, 1)[None]


def _rows(states: Tensor) -> Tensor:
    """Return ``[T, heads, dim]`` for ``[1, heads, T, dim]``, its last dimension contiguous."""
    rows = states[0].transpose(0, 1)
    return rows if rows.stride(-1) == 1 else rows.contiguous()

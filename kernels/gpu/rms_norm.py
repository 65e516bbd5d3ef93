"""RMS normalisation over the last dimension, with sums in float32. Grid ``[rows / ROWS]``.

A row is one vector to normalise; narrow rows, as of single heads, share a program.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.norm_form import NormForm

_ELEMENTS = 2048
"""Elements that one program takes at least, in whole rows."""


@triton.jit
def normalise(
    tile,  # [ROWS, WIDTH_PAD], 0 from WIDTH on
    factors,  # [WIDTH_PAD] float32
    eps,
    WIDTH: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
):
    """Return ``[ROWS, WIDTH_PAD]`` float32."""
    wide = tile.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    wide = wide * scale[:, None]
    if ROUNDS_FIRST:
        wide = wide.to(tile.dtype).to(tl.float32)
    return wide * factors[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    out,  # [num_rows, WIDTH]
    x,  # [num_rows / INNER, INNER, WIDTH]
    weight,  # [WIDTH]
    num_rows,
    stride_outer,
    stride_inner,
    eps,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    INNER: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH_PAD)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    start = row // INNER * stride_outer + row % INNER * stride_inner
    tile = tl.load(x + start[:, None] + column[None, :], mask=mask, other=0.0)
    factors = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + OFFSET
    normed = normalise(tile, factors, eps, WIDTH, ROUNDS_FIRST).to(out.dtype.element_ty)
    tl.store(out + (row * WIDTH)[:, None] + column[None, :], normed, mask=mask)


def rows_of_program(width_pad: int) -> int:
    """Return how many rows of that width one program takes."""
    return max(1, _ELEMENTS // width_pad)


def rms_norm(x: Tensor, weight: Tensor, form: NormForm) -> Tensor:
    """Normalise ``x [..., width]``, whose rows may lie apart; returns a contiguous tensor of its shape and dtype."""
    width = x.shape[-1]
    if x.is_contiguous():
        rows = x.view(-1, 1, width)
    elif x.dim() > 3 and x.stride(-1) == 1:
        rows = x.flatten(0, -3)  # [tokens, heads, width]: the heads inside a merged projection
    else:
        rows = x.contiguous().view(-1, 1, width)
    out = x.new_empty(x.shape)
    num_rows = x.numel() // width
    width_pad = triton.next_power_of_2(width)
    rows_each = rows_of_program(width_pad)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows_each),)](
        out,
        rows,
        weight,
        num_rows,
        rows.stride(0),
        rows.stride(1),
        form.eps,
        OFFSET=form.offset,
        ROUNDS_FIRST=form.rounds_first,
        INNER=rows.shape[1],
        WIDTH=width,
        WIDTH_PAD=width_pad,
        ROWS=rows_each,
        num_warps=8 if width_pad > 4096 else 4,
    )
    return out

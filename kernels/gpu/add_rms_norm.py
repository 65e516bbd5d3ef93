"""A residual sum and the RMS normalisation of it, in one pass. Grid ``[rows / ROWS]``.

The sum is rounded to its dtype before it is normalised, as it is when the two are computed apart.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.rms_norm import normalise, rows_of_program
from kernels.norm_form import NormForm


@triton.jit(do_not_specialize=["num_rows"])
def _add_rms_norm_kernel(
    summed,  # [num_rows, WIDTH]
    out,  # [num_rows, WIDTH]
    x,  # [num_rows, WIDTH]
    residual,  # [num_rows, WIDTH]
    weight,  # [WIDTH]
    num_rows,
    eps,
    OFFSET: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH_PAD)
    mask = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    place = (row * WIDTH)[:, None] + column[None, :]
    tile = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    tile += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    rounded = tile.to(summed.dtype.element_ty)
    tl.store(summed + place, rounded, mask=mask)
    factors = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32) + OFFSET
    tl.store(out + place, normalise(rounded, factors, eps, WIDTH, ROUNDS_FIRST).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, form: NormForm) -> tuple[Tensor, Tensor]:
    """Return ``x + residual`` and that normalised, both contiguous; all are ``[..., width]`` and of one dtype."""
    x, residual = x.contiguous(), residual.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    summed, out = x.new_empty(x.shape), x.new_empty(x.shape)
    width_pad = triton.next_power_of_2(width)
    rows_each = rows_of_program(width_pad)
    _add_rms_norm_kernel[(triton.cdiv(num_rows, rows_each),)](
        summed,
        out,
        x,
        residual,
        weight,
        num_rows,
        form.eps,
        OFFSET=form.offset,
        ROUNDS_FIRST=form.rounds_first,
        WIDTH=width,
        WIDTH_PAD=width_pad,
        ROWS=rows_each,
        num_warps=8 if width_pad > 4096 else 4,
    )
    return summed, out

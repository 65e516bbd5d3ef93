"""``out = gate * sigmoid(gate) * up`` in float32, for a gate and an up projection that lie side by side.

Grid ``[rows, pieces of a row]``.
"""

import triton
import triton.language as tl
from torch import Tensor

_PIECE = 1024


@triton.jit
def _silu_mul_kernel(
    out,  # [num_rows, width]
    gate_up,  # [num_rows, 2 * width]
    stride_row,
    width,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    mask = column < width
    gate = tl.load(gate_up + row * stride_row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride_row + width + column, mask=mask, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * width + column, result.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return ``[..., width]`` for ``gate_up [..., 2 * width]``, the gate first."""
    rows = gate_up.flatten(0, -2)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    num_rows, doubled = rows.shape
    width = doubled // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], width)
    piece = min(_PIECE, triton.next_power_of_2(width))
    _silu_mul_kernel[(num_rows, triton.cdiv(width, piece))](out, rows, rows.stride(0), width, PIECE=piece, num_warps=4)
    return out

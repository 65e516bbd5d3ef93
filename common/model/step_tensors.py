"""The arrays of one step on the model's device."""

from dataclasses import dataclass

from torch import Tensor

from kernels.packed_rows import PackedRows


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """See :class:`common.model.batch.StepInput`."""

    token_ids: Tensor
    """``[T]`` int64"""
    positions: Tensor
    """``[T]`` int64"""
    rows: PackedRows
    logits_rows: Tensor | None
    """``[R]`` int64; None: every row wants logits."""

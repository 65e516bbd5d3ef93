"""The arrays of one step on the model's device."""

from dataclasses import dataclass

from torch import Tensor

from common.model.wanted_rows import WantedRows
from kernels.packed_rows import PackedRows


@dataclass(frozen=True, slots=True, eq=False)
class StepTensors:
    """See :class:`common.model.batch.StepInput`."""

    token_ids: Tensor
    """``[T]`` int64"""
    positions: Tensor
    """``[T]`` int64"""
    rows: PackedRows
    wanted: WantedRows | None
    """None: the logits of every token are wanted."""

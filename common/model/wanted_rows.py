"""The tokens of a step whose logits are wanted.

The last layer need not compute the others: of those only keys and values are read again. What computes them is chosen
at load (:attr:`common.model.loaded.LoadedModel.narrows`).
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.packed_rows import PackedRows


@dataclass(frozen=True, slots=True, eq=False)
class WantedRows:
    """R of a step's T tokens, R < T."""

    indices: Tensor
    """``[R]`` int64, which of the T"""
    rows: PackedRows
    """What they see; they store nothing."""

"""One layer's keys and values inside the paged pool.

The pool keeps a block as one contiguous range across all layers, so a layer's keys are a strided view: whole inside a
block, one pool block apart from block to block.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerKV:
    """Views into the pool; writing through them writes the pool. Raises ValueError when a block is not contiguous."""

    k: Tensor
    """``[num_blocks, kv_heads, block_size, k_dim]``"""
    v: Tensor
    """``[num_blocks, kv_heads, block_size, v_dim]``"""

    def __post_init__(self) -> None:
        for name, view in (("k", self.k), ("v", self.v)):
            _, _, block_size, dim = view.shape
            if view.stride()[1:] != (block_size * dim, dim, 1):
                raise ValueError(f"{name} has strides {view.stride()}; a block of one layer must be contiguous")
        if self.k.shape[:3] != self.v.shape[:3]:
            raise ValueError(f"k {tuple(self.k.shape)} and v {tuple(self.v.shape)} may differ in the last width only")

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.k.shape[0]

    @property
    def kv_heads(self) -> int:
        """Key/value heads of the layer."""
        return self.k.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.k.shape[2]

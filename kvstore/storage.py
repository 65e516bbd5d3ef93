"""The memory of all KV blocks of a worker: one tensor, a block one row of it.

Reads and writes move whole blocks as raw bytes, so no dtype needs a NumPy twin. On a CPU the bytes are views of the
tensor; on a GPU they are copied through pinned host memory.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from common.ids import BlockId
from kernels.layer_kv import LayerKV
from kvstore.layout import KvLayout

if TYPE_CHECKING:
    from kvstore.device_copies import DeviceCopies


class KvStorage:
    """``num_blocks`` blocks of ``layout`` on ``device``. Owned by one worker.

    The compute thread writes through :meth:`layer_views`; everything else goes by block id. Nobody may read a block
    that another writes: the block pool's references and the order of steps see to that.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self._blocks = _zeros(num_blocks, layout, device)
        self._bytes = self._blocks.view(torch.uint8)  # [num_blocks, block_bytes]
        self._rows = self._bytes.numpy() if device.type == "cpu" else None

    def layer_views(self) -> list[LayerKV]:
        """Return each layer's K ``[num_blocks, kv_heads, block_size, k_dim]`` and V, views of the one tensor."""
        layout = self.layout
        return [
            LayerKV(
                k=self._view(k_offset, layer.kv_heads, layer.k_dim),
                v=self._view(v_offset, layer.kv_heads, layer.v_dim),
            )
            for layer, k_offset, v_offset in zip(layout.layers, layout.k_offsets, layout.v_offsets, strict=True)
        ]

    def parts(self, block_ids: Sequence[BlockId]) -> list[memoryview]:
        """Return buffers that make up the bytes of these blocks in order; on a CPU views of the live blocks."""
        self._check(block_ids)
        if self._rows is not None:
            return [self._rows[block_id].data for block_id in block_ids]
        return [self._copies.read(block_ids).numpy().reshape(-1).data]

    def read(self, block_ids: Sequence[BlockId]) -> bytes:
        """Return a copy of the bytes of these blocks, in order."""
        return b"".join(self.parts(block_ids))

    def write(self, block_ids: Sequence[BlockId], payload: memoryview) -> None:
        """Fill these blocks, in order, from ``len(block_ids) * block_bytes`` bytes; raises ValueError on any other."""
        self._check(block_ids)
        if payload.nbytes != len(block_ids) * self.layout.block_bytes:
            raise ValueError(
                f"{len(block_ids)} blocks take {len(block_ids) * self.layout.block_bytes} bytes, not {payload.nbytes}"
            )
        source = np.frombuffer(payload, dtype=np.uint8).reshape(len(block_ids), self.layout.block_bytes)
        if self._rows is not None:
            for row, block_id in enumerate(block_ids):
                self._rows[block_id] = source[row]
            return
        self._copies.write(block_ids, source)

    @cached_property
    def _copies(self) -> "DeviceCopies":
        from kvstore.device_copies import DeviceCopies  # loads triton

        return DeviceCopies(self._bytes)

    def copy(self, src: BlockId, dst: BlockId) -> None:
        """Copy the bytes of one block to another."""
        self._check((src, dst))
        self._bytes[dst].copy_(self._bytes[src])

    def _view(self, offset: int, kv_heads: int, dim: int) -> Tensor:
        layout = self.layout
        shape = (self.num_blocks, kv_heads, layout.block_size, dim)
        strides = (layout.block_elements, layout.block_size * dim, dim, 1)
        return torch.as_strided(self._blocks, shape, strides, storage_offset=offset)

    def _check(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks:
                raise ValueError(f"block {block_id} does not exist, the storage has {self.num_blocks}")


def _zeros(num_blocks: int, layout: KvLayout, device: torch.device) -> Tensor:
    """Return ``[num_blocks, block_elements]`` zeros; on a CPU the memory is only taken when a block is first used."""
    if device.type == "cpu":
        untouched = np.zeros((num_blocks, layout.block_bytes), dtype=np.uint8)
        return torch.from_numpy(untouched).view(layout.dtype)
    return torch.zeros(num_blocks, layout.block_elements, dtype=layout.dtype, device=device)

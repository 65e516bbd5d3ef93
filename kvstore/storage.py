"""The memory of all KV blocks of a worker: one tensor, a block one row of it.

Reads and writes move whole blocks as raw bytes, so no dtype needs a NumPy twin. On a CPU the bytes are views of the
tensor; on a GPU they are copied through pinned host memory.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.ids import BlockId
from kernels.cpu.populate import populate
from kernels.layer_kv import LayerKV
from kvstore.layout import KvLayout

if TYPE_CHECKING:
    from kvstore.device_copies import DeviceCopies


class KvStorage:
    """``num_blocks`` blocks of ``layout`` on ``device``. Owned by one worker.

    The compute thread writes through :meth:`layer_views`; everything else goes by block id. Nobody may read a block
    that another writes: the block pool's references and the order of steps see to that.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, *, memory: NDArray[np.uint8] | None = None
    ) -> None:
        """Keep the blocks in ``memory [num_blocks, block_bytes]``, zeros on the host; None: in memory of its own."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = device
        self._blocks = _zeros(num_blocks, layout, device) if memory is None else _as_blocks(memory, layout)
        self.blocks = self._blocks.view(torch.uint8)
        """``[num_blocks, block_bytes]`` uint8 on ``device``, for transports to read."""
        self._rows = self.blocks.numpy() if device.type == "cpu" else None

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
            self.gather(block_ids, source, range(len(block_ids)))
            return
        self._copies.write(block_ids, source)

    def gather(self, block_ids: Sequence[BlockId], source: NDArray[np.uint8], rows: Sequence[int]) -> None:
        """Fill these blocks, on a CPU, each from its row of ``source [any, block_bytes]``."""
        self._check(block_ids)
        assert self._rows is not None
        for block_id, row in zip(block_ids, rows, strict=True):
            self._rows[block_id] = source[row]

    def scatter(self, source: Tensor, block_ids: Sequence[BlockId]) -> None:
        """Fill these blocks, in order, from ``source [len(block_ids), block_bytes]`` uint8 on the same device."""
        self._check(block_ids)
        if self._rows is not None:
            self.gather(block_ids, source.numpy(), range(len(block_ids)))
        else:
            self._copies.scatter(source, block_ids)

    def host_bytes(self, source: Tensor) -> memoryview:
        """Return the bytes of ``source``, uint8 on the same device: on a CPU a view, else a copy."""
        return (source if self._rows is not None else self._copies.to_host(source)).numpy().reshape(-1).data

    def populate(self, block_ids: Sequence[BlockId]) -> None:
        """Have the system give the memory of these blocks now, where it would with the first write; keeps content."""
        self._check(block_ids)
        if self._rows is not None:
            for block_id in block_ids:
                populate(self.blocks[block_id].data_ptr(), self.layout.block_bytes)

    @cached_property
    def _copies(self) -> "DeviceCopies":
        from kvstore.device_copies import DeviceCopies  # loads triton

        return DeviceCopies(self.blocks)

    def copy(self, src: BlockId, dst: BlockId) -> None:
        """Copy the bytes of one block to another."""
        self._check((src, dst))
        self.blocks[dst].copy_(self.blocks[src])

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
        return _as_blocks(np.zeros((num_blocks, layout.block_bytes), dtype=np.uint8), layout)
    return torch.zeros(num_blocks, layout.block_elements, dtype=layout.dtype, device=device)


def _as_blocks(memory: NDArray[np.uint8], layout: KvLayout) -> Tensor:
    """Return ``memory [num_blocks, block_bytes]`` as ``[num_blocks, block_elements]``."""
    return torch.from_numpy(memory).view(layout.dtype)

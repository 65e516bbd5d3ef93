"""Copies of KV blocks between a GPU's pool and host memory, beside the steps that compute.

Blocks that lie apart are first gathered on the device into one range, then cross the bus in one copy to or from pinned
memory; all on a stream of its own, so a step that is queued meanwhile does not wait for the bus. A copy does wait for
the steps queued before it: they may still be writing the blocks, or reading blocks that have been given away since.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.ids import BlockId
from kernels.gpu.move_blocks import gather_blocks, scatter_blocks


class DeviceCopies:
    """Owned by the storage whose ``blocks [num_blocks, block_bytes]`` uint8 it copies; called from any thread."""

    def __init__(self, blocks: Tensor) -> None:
        self._blocks = blocks
        self._stream = torch.cuda.Stream(blocks.device)  # type: ignore[no-untyped-call]

    def read(self, block_ids: Sequence[BlockId]) -> Tensor:
        """Return these blocks, in order, in pinned memory: ``[len(block_ids), block_bytes]``."""
        host = self._pinned(len(block_ids))
        with self._copying():
            staging = torch.empty_like(host, device=self._blocks.device)
            gather_blocks(self._blocks, self._index(block_ids), staging)
            host.copy_(staging, non_blocking=True)
        return host

    def write(self, block_ids: Sequence[BlockId], payload: NDArray[np.uint8]) -> None:
        """Fill these blocks, in order, from ``payload [len(block_ids), block_bytes]``; they are in place after it."""
        host = self._pinned(len(block_ids))
        host.numpy()[:] = payload
        with self._copying():
            staging = host.to(self._blocks.device, non_blocking=True)
            scatter_blocks(staging, self._blocks, self._index(block_ids))

    def scatter(self, source: Tensor, block_ids: Sequence[BlockId]) -> None:
        """Fill these blocks, in order, from ``source [len(block_ids), block_bytes]`` on the same device."""
        with self._copying():
            scatter_blocks(source, self._blocks, self._index(block_ids))

    def to_host(self, source: Tensor) -> Tensor:
        """Return a copy in pinned memory of ``source``, blocks on the same device that no kernel writes."""
        host = self._pinned(len(source))
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return host

    @contextmanager
    def _copying(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.default_stream(self._blocks.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    def _pinned(self, num_blocks: int) -> Tensor:
        """Return uninitialised memory; torch keeps what was pinned once, so this is quick after the first time."""
        return torch.empty(num_blocks, self._blocks.shape[1], dtype=torch.uint8, pin_memory=True)

    def _index(self, block_ids: Sequence[BlockId]) -> Tensor:
        return torch.tensor(block_ids, dtype=torch.int64, device=self._blocks.device)

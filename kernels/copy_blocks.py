"""Copy whole blocks inside the pool: ``pool[dst[i]] = pool[src[i]]``, all reads before all writes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_blocks(pool: Tensor, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy blocks of ``pool [num_blocks, block_elements]``, on the device that holds it.

    A block may be both read and written: it is read first. Raises ValueError when the lists differ in length, name a
    destination twice, or name a block outside the pool.
    """
    if len(src) != len(dst) or len(set(dst)) != len(dst):
        raise ValueError("each destination needs one source, and may be named once")
    if not all(0 <= block_id < pool.shape[0] for block_id in (*src, *dst)):
        raise ValueError(f"block ids must lie in 0 to {pool.shape[0] - 1}")
    if src:
        sources = torch.tensor(src, device=pool.device)
        pool.index_copy_(0, torch.tensor(dst, device=pool.device), pool.index_select(0, sources))

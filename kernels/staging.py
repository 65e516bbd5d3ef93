"""Whole blocks between the pool and contiguous staging memory: ``staging[i] = pool[block_ids[i]]``, and back.

These run on any device; on a CPU they are one copy of memory a block. On a GPU see :mod:`kernels.gpu.move_blocks`.
"""

import torch
from torch import Tensor


def gather_blocks_eager(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """Fill ``staging [n, block_elements]`` from ``pool [num_blocks, block_elements]``; ``block_ids [n]`` int64."""
    torch.index_select(pool, 0, block_ids, out=staging)


def scatter_blocks_eager(staging: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """Fill blocks of ``pool`` from ``staging``; no block may be named twice."""
    pool.index_copy_(0, block_ids, staging)

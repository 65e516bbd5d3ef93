"""Tensors as flat NumPy arrays for compiled kernels, without copying."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

_BITS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
"""How each dtype is shown to the kernels; NumPy has no bfloat16."""


def flat(tensor: Tensor) -> NDArray[Any]:
    """Return the elements of a contiguous tensor."""
    return tensor.view(_BITS[tensor.dtype]).view(-1).numpy()


def flat_pool(view: Tensor) -> NDArray[Any]:
    """Return all elements from the first to the last of a strided ``[num_blocks, kv_heads, block_size, dim]`` view."""
    num_blocks, kv_heads, block_size, dim = view.shape
    span = (num_blocks - 1) * view.stride(0) + kv_heads * block_size * dim
    return flat(view.as_strided((span,), (1,)))

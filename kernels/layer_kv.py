"""The KV cache of one layer, as kernels see it: two strided views into the pool's one tensor."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerKV:
    """Views whose block stride is that of a whole block across all layers, so they are not contiguous."""

    k: Tensor  # [num_blocks, kv_heads, block_size, k_dim]
    v: Tensor  # [num_blocks, kv_heads, block_size, v_dim]

"""How the KV of one block lies in memory: one contiguous range across all layers.

    block = layer 0: K [kv_heads, block_size, k_dim], V [kv_heads, block_size, v_dim]; layer 1: K, V; ...

So a block moves by id as one copy. ``NAME`` goes into the fingerprint and changes with this order.
"""

from dataclasses import dataclass, field

import torch

from common.errors import ConfigError
from common.model.spec import LayerSpec

NAME = "block:layer:kv:head:token:dim"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Sizes and offsets inside a block. Elements are of ``dtype``; offsets count elements from the block's start."""

    layers: tuple[LayerSpec, ...]
    block_size: int
    """Tokens in a block."""
    dtype: torch.dtype
    k_offsets: tuple[int, ...] = field(init=False)
    """Where the K of each layer begins."""
    v_offsets: tuple[int, ...] = field(init=False)
    """Where the V of each layer begins."""
    block_elements: int = field(init=False)
    block_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"a block holds at least one token, not {self.block_size}")
        if not self.layers:
            raise ConfigError("a model without attention layers has no KV blocks")
        offset = 0
        k_offsets: list[int] = []
        v_offsets: list[int] = []
        for layer in self.layers:
            k_offsets.append(offset)
            offset += layer.kv_heads * self.block_size * layer.k_dim
            v_offsets.append(offset)
            offset += layer.kv_heads * self.block_size * layer.v_dim
        object.__setattr__(self, "k_offsets", tuple(k_offsets))
        object.__setattr__(self, "v_offsets", tuple(v_offsets))
        object.__setattr__(self, "block_elements", offset)
        object.__setattr__(self, "block_bytes", offset * self.dtype.itemsize)

"""What the rest of a worker must know about a loaded model; found at load, never changed."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """The KV that one layer keeps for each token: ``kv_heads`` rows of ``k_dim`` and of ``v_dim`` elements."""

    kv_heads: int
    k_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One loaded model, as seen from the KV store and the schedulers."""

    name: str
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    model_digest: str
    """Digest of the configuration and the weights."""
    tokenizer_digest: str
    """Digest of the tokenizer's files."""
    quantization: str = "none"

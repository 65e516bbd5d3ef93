"""The forward pass of a compiled model without what transformers does around it.

transformers' own code looks for masks, caches, hooks and outputs to capture, for each step anew. Behind a step that has
read all weights none of that code is in the processor's caches any more, and it cost half a millisecond of 14 (SmolLM2,
one sequence, one thread). What is left here are the module's own parts in their order; for the known classes that order
is their formula, and the self-check at load compares the logits with those of the untouched model.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.model.attention import current_step
from common.model.cpu_layer import native_of
from common.model.cpu_stack import CpuDecoderStack

_KNOWN = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM"}
)
"""logits = head(norm(layers(embedding(tokens), angles(positions))))"""

_MOVING_ANGLES = ("dynamic", "longrope")
"""Kinds of rotary positions whose angles depend on how long the sequence is."""


class StraightModel:
    """The parts of ``model``, whose layers are one compiled stack, for positions below ``max_model_len``."""

    def __init__(self, model: Any, max_model_len: int) -> None:
        decoder = model.model
        (self._stack,) = decoder.layers
        self._embedding: Tensor = decoder.embed_tokens.weight
        self._norm, self._head = decoder.norm, model.lm_head
        self._norm_weight, self._epsilon = decoder.norm.weight.float(), float(decoder.norm.variance_epsilon)
        self._cos, self._sin = _angles(decoder.rotary_emb, self._embedding, max_model_len)

    def __call__(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Return ``[R, vocab]`` logits of the rows that are wanted, for ``token_ids`` and ``positions [T]``."""
        x = self._embedding[token_ids][None]
        x = self._stack(x, position_embeddings=(self._cos[positions][None], self._sin[positions][None]))[0]
        native = native_of(current_step())
        normed = self._norm(x) if native is None else native.rms_norm(x, self._norm_weight, self._epsilon)
        logits: Tensor = self._head(normed)
        return logits


def straight_model(model: PreTrainedModel, max_model_len: int) -> StraightModel | None:
    """Return the straight way through ``model``, or None where there is none."""
    if type(model).__name__ not in _KNOWN:
        return None
    decoder: Any = model.model
    is_compiled = len(decoder.layers) == 1 and isinstance(decoder.layers[0], CpuDecoderStack)
    moves = any(kind in str(decoder.rotary_emb.rope_type) for kind in _MOVING_ANGLES)
    return StraightModel(model, max_model_len) if is_compiled and not moves else None


@torch.inference_mode()
def _angles(rotary: Any, like: Tensor, max_model_len: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines ``[max_model_len, width]`` in the dtype of ``like``."""
    cos, sin = rotary(like, torch.arange(max_model_len, device=like.device)[None])
    return cos[0].contiguous(), sin[0].contiguous()

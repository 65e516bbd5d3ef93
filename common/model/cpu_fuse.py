"""Puts the compiled CPU modules in the place of transformers' own, after load.

Decoder layers of the Llama pattern become one module each, and all of them together one; every other linear map becomes
one that picks the faster product. Which layers follow the pattern is known by class, because a class is its formula;
the self-check at load then compares the logits with those of the untouched model.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from common.model.attention import LayerAttention
from common.model.cpu_layer import CpuDecoderLayer, CpuLinear
from common.model.cpu_stack import CpuDecoderStack
from common.model.llama_pattern import LLAMA_PATTERN
from kernels.cpu.huge_pages import gather_in_huge_pages
from kernels.cpu.native.library import DTYPES, load_library
from kernels.decoder_layer import LayerWeights, LinearWeights

_LINEARS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
_MLP_LINEARS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_PROBE = torch.linspace(-8.0, 8.0, 33)
"""What an activation is asked for, to be known by its answer."""


def fuse_for_cpu(model: PreTrainedModel, attention: Sequence[LayerAttention]) -> bool:
    """Swap what can be swapped in ``model``; does nothing where the compiled library is not there.

    Returns whether the last layer now computes only the rows whose logits are wanted.
    """
    if model.device.type != "cpu" or load_library() is None:
        return False
    gather_in_huge_pages(list(model.parameters()))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if fused := _fused_layer(child, attention):
                setattr(parent, name, fused)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if stack := _stack(child):
                setattr(parent, name, stack)
    for parent in list(model.modules()):
        if isinstance(parent, (CpuLinear, CpuDecoderLayer)):
            continue
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _suits(child.weight):
                setattr(parent, name, CpuLinear(child))
    return any(isinstance(module, CpuDecoderStack) for module in model.modules())


def _fused_layer(layer: Any, attention: Sequence[LayerAttention]) -> CpuDecoderLayer | None:
    weights = _layer_weights(layer, attention)
    return None if weights is None else CpuDecoderLayer(layer, int(layer.self_attn.layer_idx), weights)


def _stack(layers: nn.Module) -> nn.ModuleList | None:
    """Return a list of one module for a list of decoder layers that are all compiled."""
    fused = [layer for layer in layers.children() if isinstance(layer, CpuDecoderLayer)]
    if not fused or not isinstance(layers, nn.ModuleList) or len(fused) < len(layers):
        return None
    return nn.ModuleList([CpuDecoderStack(fused)])


def _layer_weights(layer: Any, attention: Sequence[LayerAttention]) -> LayerWeights | None:
    """Return the weights of ``layer`` if it follows the pattern and the library can compute with all of them."""
    if type(layer).__name__ not in LLAMA_PATTERN:
        return None
    attend, mlp = layer.self_attn, layer.mlp
    named = {name: getattr(attend, attribute) for name, attribute in _LINEARS.items()}
    named |= {name: getattr(mlp, attribute) for name, attribute in _MLP_LINEARS.items()}
    is_plain = all(type(linear) is nn.Linear and _suits(linear.weight) for linear in named.values())
    if not is_plain or len({linear.weight.dtype for linear in named.values()}) > 1:
        return None
    if not torch.equal(mlp.act_fn(_PROBE), nn.functional.silu(_PROBE)):
        return None
    q_norm, k_norm = (getattr(attend, name, None) for name in ("q_norm", "k_norm"))
    return LayerWeights(
        **{name: LinearWeights(linear.weight, linear.bias) for name, linear in named.items()},
        attention_norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        q_norm=q_norm.weight if q_norm is not None else None,
        k_norm=k_norm.weight if k_norm is not None else None,
        epsilon=float(layer.input_layernorm.variance_epsilon),
        head_dim=int(attend.head_dim),
        rotary=bool(getattr(attend, "use_rope", True)),
        form=attention[int(attend.layer_idx)].form,
    )


def _suits(weight: Tensor) -> bool:
    return weight.dtype in DTYPES and weight.is_contiguous()

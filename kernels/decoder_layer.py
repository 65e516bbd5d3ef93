"""One decoder layer of the Llama pattern, and its eager reference.

``middle = x + o(attention(rotary(q, k), v))`` with ``q, k, v = linear(norm(x))``, then
``out = middle + down(silu(gate(y)) * up(y))`` with ``y = norm(middle)``; norms are root-mean-square norms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.attention_form import AttentionForm
from kernels.elementwise import EagerElementwise
from kernels.layer_kv import LayerKV
from kernels.norm_form import NormForm
from kernels.packed_rows import PackedRows
from kernels.paged_attention import paged_attention_eager
from kernels.store_kv import store_kv_eager

_EAGER = EagerElementwise()


@dataclass(frozen=True, slots=True, eq=False)
class LinearWeights:
    """``x weight^T + bias``"""

    weight: Tensor
    """``[outputs, inputs]``"""
    bias: Tensor | None
    """``[outputs]``"""


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one layer, all of one dtype, and what its norms and attention need."""

    q: LinearWeights
    k: LinearWeights
    v: LinearWeights
    o: LinearWeights
    gate: LinearWeights
    up: LinearWeights
    down: LinearWeights
    attention_norm: Tensor
    """``[hidden]``"""
    mlp_norm: Tensor
    """``[hidden]``"""
    q_norm: Tensor | None
    """``[head_dim]``; a norm of each query head before the rotation, ``k_norm`` likewise."""
    k_norm: Tensor | None
    epsilon: float
    head_dim: int
    rotary: bool
    """Whether queries and keys are rotated at all."""
    form: AttentionForm


def decoder_layer_eager(
    layer: LayerWeights, x: Tensor, cos: Tensor, sin: Tensor, kv: LayerKV, rows: PackedRows
) -> Tensor:
    """Return ``[T, hidden]`` for ``x [T, hidden]``, turned by ``cos`` and ``sin [T, width]``; store keys and values."""
    form = NormForm(layer.epsilon)
    y = _EAGER.rms_norm(x, layer.attention_norm, form)
    q, k, v = (_heads(linear(y, part.weight, part.bias), layer.head_dim) for part in (layer.q, layer.k, layer.v))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = _EAGER.rms_norm(q, layer.q_norm, form), _EAGER.rms_norm(k, layer.k_norm, form)
    if layer.rotary:
        turned = _EAGER.rotary(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
        q, k = (states[0].transpose(0, 1) for states in turned)
    store_kv_eager(k, v, kv, rows)
    attended = paged_attention_eager(q, kv, rows, layer.form).flatten(1)
    middle = x + linear(attended, layer.o.weight, layer.o.bias)
    y = _EAGER.rms_norm(middle, layer.mlp_norm, form)
    gate_up = torch.cat([linear(y, part.weight, part.bias) for part in (layer.gate, layer.up)], dim=-1)
    return middle + linear(_EAGER.silu_mul(gate_up), layer.down.weight, layer.down.bias)


def _heads(states: Tensor, head_dim: int) -> Tensor:
    return states.view(len(states), -1, head_dim)

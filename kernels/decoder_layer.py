"""One decoder layer of the Llama pattern, and its eager reference.

``middle = x + o(attention(rotary(q, k), v))`` with ``q, k, v = linear(norm(x))``, then
``out = middle + down(silu(gate(y)) * up(y))`` with ``y = norm(middle)``; norms are root-mean-square norms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kernels.attention_form import AttentionForm
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows
from kernels.paged_attention import paged_attention_eager
from kernels.store_kv import store_kv_eager


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
    """Return ``[T, hidden]`` for ``x [T, hidden]``, rotated by ``cos`` and ``sin [T, width]``; store keys and values."""
    y = rms_norm_eager(x, layer.attention_norm, layer.epsilon)
    q, k, v = (_heads(linear(y, part.weight, part.bias), layer.head_dim) for part in (layer.q, layer.k, layer.v))
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = (rms_norm_eager(*pair, layer.epsilon) for pair in ((q, layer.q_norm), (k, layer.k_norm)))
    if layer.rotary:
        q, k = rotate_eager(q, cos, sin), rotate_eager(k, cos, sin)
    store_kv_eager(k, v, kv, rows)
    attended = paged_attention_eager(q, kv, rows, layer.form).flatten(1)
    middle = x + linear(attended, layer.o.weight, layer.o.bias)
    y = rms_norm_eager(middle, layer.mlp_norm, layer.epsilon)
    gate, up = (linear(y, part.weight, part.bias) for part in (layer.gate, layer.up))
    return middle + linear(silu_mul_eager(gate, up), layer.down.weight, layer.down.bias)


def rms_norm_eager(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return ``x / sqrt(mean(x**2) + epsilon) * weight`` over the last dimension, the mean in float32."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)).to(x.dtype)


def rotate_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``width`` elements of each head of ``x [T, heads, dim]`` by ``cos`` and ``sin [T, width]``.

    Element i turns with element ``i + width / 2`` (Su et al., RoFormer, 2021, in the order of GPT-NeoX).
    """
    turned, rest = x[..., : cos.shape[1]], x[..., cos.shape[1] :]
    low, high = turned.chunk(2, dim=-1)
    half_turned = torch.cat((-high, low), dim=-1)
    return torch.cat((turned * cos[:, None] + half_turned * sin[:, None], rest), dim=-1)


def silu_mul_eager(gate: Tensor, up: Tensor) -> Tensor:
    """Return ``silu(gate) * up``."""
    return silu(gate) * up


def _heads(states: Tensor, head_dim: int) -> Tensor:
    return states.unflatten(-1, (-1, head_dim))

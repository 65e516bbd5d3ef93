"""Our attention inside transformers' own model code.

transformers looks attention up by name. ``baton`` writes a step's keys and values into the paged pool and attends
through block tables. transformers builds no mask for it, because no mask function is registered under that name.
What a step needs travels in a context variable, set for the duration of one forward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from common.errors import InternalError
from common.model.wanted_rows import WantedRows
from kernels.attention_form import AttentionForm
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows
from kernels.select import Kernels

NAME = "baton"
"""The name under which transformers finds the paged attention."""


@dataclass(frozen=True, slots=True)
class QueryTemperature:
    """Llama 4 scales the queries of layers without rotary positions by ``1 + scale * ln(1 + (p + 1) // floor)``."""

    scale: float
    floor: float

    def apply(self, q: Tensor, positions: Tensor) -> Tensor:
        """Return ``q [T, heads, dim]`` scaled by each row's position."""
        factors = torch.log1p(torch.floor((positions.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (q * factors[:, None, None]).to(q.dtype)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What the probe found out about the attention of one layer."""

    form: AttentionForm
    temperature: QueryTemperature | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PagedStep:
    """Everything the attention of all layers needs in one step."""

    kernels: Kernels
    layers: tuple[LayerAttention, ...]
    caches: tuple[LayerKV, ...]
    rows: PackedRows
    positions: Tensor
    """``[T]`` int64"""
    wanted: WantedRows | None = None
    """None: the logits of every token are wanted."""


_STEP: ContextVar[PagedStep] = ContextVar("baton_paged_step")


@contextmanager
def attending(step: PagedStep) -> Iterator[None]:
    """Make ``step`` the one that the attention of this thread's forward pass works on."""
    token = _STEP.set(step)
    try:
        yield
    finally:
        _STEP.reset(token)


def current_step() -> PagedStep | None:
    """Return the step that this thread's forward pass works on, if it is one on paged KV."""
    return _STEP.get(None)


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, q_heads, T, k_dim]
    key: Tensor,  # [1, kv_heads, T, k_dim]
    value: Tensor,  # [1, kv_heads, T, v_dim]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,  # [q_heads]
    **_: Any,
) -> tuple[Tensor, None]:
    """Return ``[1, T, q_heads, v_dim]``; the signature is transformers'."""
    step = _STEP.get()
    index: int = module.layer_idx  # type: ignore[assignment]
    layer, cache = step.layers[index], step.caches[index]
    if attention_mask is not None or (scaling is not None and scaling != layer.form.scaling):
        raise InternalError(f"layer {index} asks for another attention than it did at load")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    if layer.temperature is not None:
        q = layer.temperature.apply(q, step.positions)
    step.kernels.store_kv(k, v, cache, step.rows)
    return step.kernels.paged_attention(q, cache, step.rows, layer.form, s_aux)[None], None


AttentionInterface.register(NAME, _attention)

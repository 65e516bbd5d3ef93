"""Finds out what each layer's attention does, by running one token through the model.

The probe stands in for attention and for mask construction. So each layer shows the widths of its keys and values,
its scaling and soft cap, and the mask it would be given: the mask says which layers see a window or a chunk only.
"""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from common.errors import UnsupportedModel
from common.model.attention import LayerAttention, QueryTemperature
from common.model.spec import LayerSpec
from kernels.attention_form import AttentionForm

NAME = "baton-probe"
"""The name under which transformers finds the probe."""

_UNDERSTOOD = {"s_aux", "position_ids", "cache_position", "position_embeddings"}
"""Tensors in an attention call that the paged path honours, or that change nothing in attention itself."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """What the probe hands to the layers in place of a mask: the keys that the mask would let a query see."""

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """One layer's attention, as it was called."""

    module: nn.Module
    spec: LayerSpec
    attention: LayerAttention


_CALLS: ContextVar[list[ProbedLayer]] = ContextVar("baton_probed_layers")


def probe(model: PreTrainedModel) -> list[ProbedLayer]:
    """Return the model's layers in order; the model is left with the probe as its attention.

    Raises UnsupportedModel when a layer does not attend through transformers' interface exactly once, or does
    something that the paged path does not know.
    """
    name = type(model).__name__
    model.set_attn_implementation(NAME)
    calls: list[ProbedLayer] = []
    token = _CALLS.set(calls)
    try:
        _forward_one_token(model)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{name} cannot be run token by token on paged KV: {error}") from error
    finally:
        _CALLS.reset(token)
    num_layers = model.config.get_text_config().num_hidden_layers
    seen = sorted(int(layer.module.layer_idx) for layer in calls)  # type: ignore[arg-type]
    if seen != list(range(num_layers)):
        raise UnsupportedModel(
            f"{name} has {num_layers} layers, of which {len(set(seen))} attend through transformers' attention "
            f"interface in {len(seen)} calls; the paged path needs one call from each"
        )
    return sorted(calls, key=lambda layer: int(layer.module.layer_idx))  # type: ignore[arg-type]


@torch.inference_mode()
def _forward_one_token(model: PreTrainedModel) -> None:
    zero = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(input_ids=zero, position_ids=zero, use_cache=False, logits_to_keep=zero[0])


def _attention(
    module: nn.Module,
    query: Tensor,  # [1, q_heads, 1, k_dim]
    key: Tensor,  # [1, kv_heads, 1, k_dim]
    value: Tensor,  # [1, kv_heads, 1, v_dim]
    attention_mask: Visibility | Tensor | None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    """Note the call; answer with the only value that there is to attend to."""
    unknown = {name for name, value in arguments.items() if isinstance(value, Tensor)} - _UNDERSTOOD
    if unknown:
        raise UnsupportedModel(f"its attention uses {', '.join(sorted(unknown))}, which the paged path does not know")
    if isinstance(attention_mask, Tensor) or arguments.get("is_causal") is False:
        raise UnsupportedModel("its attention builds its own mask or is not causal")
    form = AttentionForm(
        scaling=_scaling(arguments.get("scaling"), query),
        window=attention_mask.window if attention_mask else arguments.get("sliding_window"),
        chunk=attention_mask.chunk if attention_mask else None,
        softcap=arguments.get("softcap"),
    )
    spec = LayerSpec(key.shape[1], key.shape[3], value.shape[3])
    _CALLS.get().append(ProbedLayer(module, spec, LayerAttention(form, _temperature(module))))
    out = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return out.transpose(1, 2), None


def _scaling(scaling: float | None, query: Tensor) -> float:
    return float(query.shape[-1]) ** -0.5 if scaling is None else float(scaling)


def _temperature(module: nn.Module) -> QueryTemperature | None:
    """Return the query temperature of a layer that would compute it from row numbers, taking packing for padding."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    return QueryTemperature(float(module.attn_scale), float(module.floor_scale))  # type: ignore[arg-type]


def _mask(*, mask_function: Callable[..., Tensor], local_size: int | None = None, **_: Any) -> Visibility:
    """Find out what ``mask_function(batch, head, query, key)`` lets a query see; the signature is transformers'."""
    position = 3 * (local_size or 1) + (local_size or 1) // 2
    zero = torch.zeros((), dtype=torch.int64)
    keys = torch.arange(position + 2)
    visible = mask_function(zero, zero, torch.tensor(position), keys).expand(keys.shape).nonzero()[:, 0]
    for candidate in (Visibility(), Visibility(window=local_size), Visibility(chunk=local_size)):
        first = AttentionForm(1.0, candidate.window, candidate.chunk).first_key(position)
        if torch.equal(visible, keys[first : position + 1]):
            return candidate
    raise UnsupportedModel("its attention mask is neither causal, nor a sliding window, nor chunked")


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)

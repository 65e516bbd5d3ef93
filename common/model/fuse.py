"""Replaces well-known pieces of a loaded model by fused ones that compute the same.

Query, key and value projections are merged, and gate and up projections; RMS norms, rotary positions and silu-times-up
become one kernel each. A piece is known by its shape and then tried: unless it gives what the original gives on random
numbers, the original stays. transformers' own code goes on running around the pieces. In layers that are known by class
the residual sums are computed with the norms behind them (:mod:`common.model.fused_norm`).
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from common.model.fused_norm import FusedRmsNorm, fuse_residuals
from common.model.merged_linear import MergedLinear, merge
from kernels.elementwise import EagerElementwise, Elementwise
from kernels.norm_form import NormForm

log = logging.getLogger(__name__)

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")
_ROTARY = "apply_rotary_pos_emb"
_LIMIT = 1e-5
_LIMIT_16_BITS = 0.02
"""Largest difference over the largest value; rounding alone gives 1e-6 in float32 and 0.008 in bfloat16."""


@dataclass(frozen=True, slots=True)
class Fused:
    """How many pieces were replaced."""

    merged: int = 0
    norms: int = 0
    rotaries: int = 0
    mlps: int = 0
    residuals: int = 0


class FusedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))`` in two matrix products and one kernel."""

    def __init__(self, gate_up: MergedLinear, down_proj: nn.Module, elementwise: Elementwise) -> None:
        super().__init__()
        self.down_proj, self._gate_up, self._elementwise = down_proj, gate_up, elementwise

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., width]`` for ``x [..., width]``."""
        out: Tensor = self.down_proj(self._elementwise.silu_mul(self._gate_up(x)))
        return out


@torch.inference_mode()
def fuse(model: nn.Module, attentions: Sequence[nn.Module], elementwise: Elementwise) -> Fused:
    """Fuse what is known in ``model``, whose layers attend in the modules ``attentions``; return what was found."""
    found = Fused(
        merged=sum(merge(attention, _QKV) is not None for attention in attentions),
        rotaries=sum(_swap_rotary(attention, elementwise) for attention in attentions),
        norms=_replace(model, lambda module: _fused_norm(module, elementwise)),
        mlps=_replace(model, lambda module: _fused_mlp(module, elementwise)),
        residuals=fuse_residuals(model),
    )
    log.info("fused %s", found)
    return found


def _replace(model: nn.Module, fused: Callable[[nn.Module], nn.Module | None]) -> int:
    """Put what ``fused`` makes of each module in its place; return how many."""
    count = 0
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            new = fused(child)
            if new is not None:
                setattr(owner, name, new)
                count += 1
    return count


def _fused_norm(module: nn.Module, elementwise: Elementwise) -> nn.Module | None:
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or list(parameters) != ["weight"] or not isinstance(eps, float):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1:
        return None
    x = _random(weight, 2, 3, len(weight))
    expected = module(x)
    forms = (NormForm(eps), NormForm(eps, rounds_first=False), NormForm(eps, offset=1.0, rounds_first=False))
    form = min(forms, key=lambda form: _difference(EagerElementwise().rms_norm(x, weight, form), expected))
    new = FusedRmsNorm(weight, form, elementwise)
    return new if _agree(new(x), expected) else None


def _fused_mlp(module: nn.Module, elementwise: Elementwise) -> nn.Module | None:
    names = [name for name, _ in module.named_children()]
    down = getattr(module, "down_proj", None)
    if not {*_GATE_UP, "down_proj"}.issubset(names) or type(down) is not nn.Linear:
        return None
    x = _random(down.weight, 1, 3, down.out_features)
    expected = module(x)
    gate_up = merge(module, _GATE_UP)
    if gate_up is None:
        return None
    new = FusedMlp(gate_up, down, elementwise)
    return new if _agree(new(x), expected) else None  # with another activation the merged projections stay


def _swap_rotary(attention: nn.Module, elementwise: Elementwise) -> bool:
    """Let the module's forward code call the kernel where it names transformers' function for rotary positions."""
    forward = inspect.unwrap(type(attention).forward)
    original = forward.__globals__.get(_ROTARY)
    if original is None or _ROTARY not in forward.__code__.co_names or not _turns_halves(original, attention):
        return False

    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *others: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if others or options or not q.shape[-1] == k.shape[-1] == cos.shape[-1]:
            turned: tuple[Tensor, Tensor] = original(q, k, cos, sin, *others, **options)
            return turned
        return elementwise.rotary(q, k, cos, sin)

    names = {**forward.__globals__, _ROTARY: rotary}
    swapped = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    swapped.__kwdefaults__ = forward.__kwdefaults__
    attention.forward = MethodType(swapped, attention)
    return True


def _turns_halves(function: Callable[..., Any], attention: nn.Module) -> bool:
    """Say whether ``function`` does what the kernel does; others turn neighbours, or a part of a head only."""
    like = next(attention.parameters())
    q, k = _random(like, 1, 2, 3, 16), _random(like, 1, 1, 3, 16)
    cos, sin = _random(like, 2, 1, 3, 16)
    try:
        actual = function(q, k, cos, sin)
    except (RuntimeError, TypeError):  # asks for other shapes or arguments
        return False
    expected = EagerElementwise().rotary(q, k, cos, sin)
    return all(_agree(one, other) for one, other in zip(actual, expected, strict=True))


def _random(like: Tensor, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def _difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    return float((actual.float() - expected.float()).abs().max() / expected.float().abs().max())


def _agree(actual: Tensor, expected: Tensor) -> bool:
    limit = _LIMIT if expected.dtype == torch.float32 else _LIMIT_16_BITS
    return actual.dtype == expected.dtype and _difference(actual, expected) <= limit

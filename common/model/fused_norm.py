"""RMS norms in one kernel, alone or together with the residual sum before them.

In layers of the Llama pattern every norm follows a sum: the second one the sum inside the layer, the first one the sum
at the end of the layer before. That one is computed there, and waits here until the layer asks for it. The last layer
goes on behind its attention with the rows whose logits are wanted.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from common.model.attention import current_step
from common.model.llama_pattern import LLAMA_PATTERN
from kernels.elementwise import Elementwise
from kernels.norm_form import NormForm


class FusedRmsNorm(nn.Module):
    """An RMS norm in one kernel."""

    def __init__(self, weight: nn.Parameter, form: NormForm, elementwise: Elementwise) -> None:
        super().__init__()
        self.weight, self._form, self._elementwise = weight, form, elementwise
        self._summed: Tensor | None = None
        self._normed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x [..., width]`` normalised, which :meth:`sum_ahead` may have done already."""
        normed = self._normed if x is self._summed else None
        self._summed = self._normed = None
        return self._elementwise.rms_norm(x, self.weight, self._form) if normed is None else normed

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``x + residual`` and that normalised, both ``[..., width]``."""
        return self._elementwise.add_rms_norm(x, residual, self.weight, self._form)

    def sum_ahead(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return ``x + residual``; the next call is expected to ask for the norm of that very tensor."""
        self._summed, self._normed = self.of_sum(x, residual)
        return self._summed


def fuse_residuals(model: nn.Module) -> int:
    """Compute the sums of known layers together with the norms behind them; return how many sums."""
    count = 0
    for owner in model.modules():
        layers, last = getattr(owner, "layers", None), getattr(owner, "norm", None)
        if isinstance(layers, nn.ModuleList) and isinstance(last, FusedRmsNorm) and all(map(_is_known, layers)):
            following = [*(layer.input_layernorm for layer in layers[1:]), last]
            for layer, norm in zip(layers, following, strict=True):
                layer.forward = _forward(layer, norm, is_last=norm is last)
                count += 2
    return count


def _is_known(layer: nn.Module) -> bool:
    norms = (getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm"))
    return type(layer).__name__ in LLAMA_PATTERN and all(isinstance(norm, FusedRmsNorm) for norm in norms)


def _forward(layer: Any, following: Any, *, is_last: bool) -> Callable[..., Tensor]:
    """Return what stands in for the forward of ``layer``, before whose result comes the norm ``following``."""

    def forward(hidden_states: Tensor, **options: Any) -> Tensor:
        attended, *_ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
        if is_last:
            attended, hidden_states = _wanted(attended), _wanted(hidden_states)
        middle, normed = layer.post_attention_layernorm.of_sum(attended, hidden_states)
        summed: Tensor = following.sum_ahead(layer.mlp(normed), middle)
        return summed

    return forward


def _wanted(states: Tensor) -> Tensor:
    """Return the rows of ``states [1, T, width]`` whose logits are wanted."""
    step = current_step()
    return states if step is None or step.wanted is None else states[:, step.wanted.indices]

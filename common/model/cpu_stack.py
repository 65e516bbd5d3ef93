"""All decoder layers of a model as one module: one compiled call for a step.

Between two calls Python does some work, and the compiled kernels' threads go to sleep meanwhile and have to be woken
again; with a small model that costs more than the layer itself.

Of a prompt's tokens the last layer computes only keys and values, but for those whose logits are wanted.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from common.model.attention import PagedStep, current_step
from common.model.cpu_layer import CpuDecoderLayer, native_of
from common.model.wanted_rows import WantedRows
from kernels.cpu.native.operations import Native, as_stack
from kernels.cpu.plan import CpuPlan
from kernels.layer_kv import LayerKV


class CpuDecoderStack(nn.Module):
    """Stands in the model's list of layers for all of them; layers of the Llama pattern take the same arguments."""

    def __init__(self, layers: Sequence[CpuDecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._all, self._others, self._last = _Run(layers), _Run(layers[:-1]), _Run(layers[-1:])

    def forward(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        """Return ``[1, R, hidden]``, the rows whose logits are wanted; takes what transformers' layers take."""
        step = current_step()
        native = native_of(step)
        if step is not None and native is not None:
            x, cos, sin = (states[0].contiguous() for states in (hidden_states, *position_embeddings))
            return self._compiled(native, step, x, cos, sin)[None]
        for layer in self.layers:
            hidden_states = layer(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        return hidden_states if step is None or step.wanted is None else hidden_states[:, step.wanted.indices]

    def _compiled(self, native: Native, step: PagedStep, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wanted = step.wanted
        if wanted is None:
            return self._all(native, step, x, cos, sin)
        if 2 * len(wanted.indices) > len(x):  # leaving out so few does not pay
            return self._all(native, step, x, cos, sin)[wanted.indices]
        x = self._others(native, step, x, cos, sin)
        self._last.store_kv(native, step, x, cos, sin)
        x, cos, sin = (states[wanted.indices] for states in (x, cos, sin))
        return self._last(native, _narrowed(step, wanted), x, cos, sin)


class _Run:
    """Layers that run one after the other; maybe none."""

    def __init__(self, layers: Sequence[CpuDecoderLayer]) -> None:
        self._layers = tuple(layers)
        self._native = as_stack([layer.native_layer for layer in layers])

    def __call__(self, native: Native, step: PagedStep, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``[T, hidden]`` for contiguous ``x [T, hidden]``, and ``cos`` and ``sin [T, width]``."""
        if not self._layers or len(x) == 0:
            return x
        caches, plan = self._planned(native, step)
        if native.can_run_layers(self._native, caches, plan, x.dtype):
            return native.decoder_layers(self._native, x, cos, sin, caches, plan)
        for layer in self._layers:
            x = layer.in_pieces(native, step, x, cos, sin)
        return x

    def store_kv(self, native: Native, step: PagedStep, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Store the keys and values that one layer does, and compute nothing else."""
        (layer,) = self._layers
        caches, plan = self._planned(native, step)
        if native.can_run_layers(self._native, caches, plan, x.dtype):
            native.layer_kv(layer.native_layer, x, cos, sin, caches[0], plan)
        else:
            layer.store_kv(native, step, x, cos, sin)

    def _planned(self, native: Native, step: PagedStep) -> tuple[list[LayerKV], CpuPlan]:
        caches = [step.caches[layer.index] for layer in self._layers]
        return caches, native.plans.of(step.rows, caches[0])


def _narrowed(step: PagedStep, wanted: WantedRows) -> PagedStep:
    """Return the step of the ``wanted`` rows only."""
    return replace(step, rows=wanted.rows, positions=step.positions[wanted.indices], wanted=None)

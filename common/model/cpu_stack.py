"""All decoder layers of a model as one module: one compiled call for a step.

Between two calls Python does some work, and the compiled kernels' threads go to sleep meanwhile and have to be woken
again; with a small model that costs more than the layer itself.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from common.model.attention import current_step
from common.model.cpu_layer import CpuDecoderLayer, native_of
from kernels.cpu.native.operations import as_stack


class CpuDecoderStack(nn.Module):
    """Stands in the model's list of layers for all of them; layers of the Llama pattern take the same arguments."""

    def __init__(self, layers: Sequence[CpuDecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._indices = [layer.index for layer in layers]
        self._stack = as_stack([layer.native_layer for layer in layers])

    def forward(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        """Return ``[1, T, hidden]``; the signature is that of transformers' layers."""
        step = current_step()
        native = native_of(step)
        if step is not None and native is not None:
            caches = [step.caches[index] for index in self._indices]
            plan = native.plans.of(step.rows, caches[0])
            if native.can_run_layers(self._stack, caches, plan, hidden_states.dtype):
                x, cos, sin = (states[0].contiguous() for states in (hidden_states, *position_embeddings))
                return native.decoder_layers(self._stack, x, cos, sin, caches, plan)[None]
        for layer in self.layers:
            hidden_states = layer(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        return hidden_states

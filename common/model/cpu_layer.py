"""Modules that stand in for transformers' own on a CPU and run the compiled operations.

Each holds the module that it replaces, and hands a call on to it whenever the step does not run on compiled kernels.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from common.model.attention import PagedStep, current_step
from kernels.cpu.native.operations import Native, NativeLinear, as_layer, as_linear
from kernels.decoder_layer import LayerWeights, LinearWeights


class CpuLinear(nn.Module):
    """A linear map that takes the faster of the compiled product and torch's."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.original = original
        self._linear = as_linear(LinearWeights(original.weight, original.bias))

    @property
    def weight(self) -> Tensor:
        """The weights of the map, which other modules may look at."""
        return self.original.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., outputs]`` for ``x [..., inputs]``."""
        found = native_of(current_step())
        return self.original(x) if found is None else _product(found, x, self._linear)


class CpuDecoderLayer(nn.Module):
    """A decoder layer of the Llama pattern in compiled pieces; :class:`CpuDecoderStack` runs whole ones.

    ``index`` is its place in the model, ``native_layer`` what the library reads.
    """

    def __init__(self, original: nn.Module, index: int, weights: LayerWeights) -> None:
        super().__init__()
        self.original = original
        self.index = index
        self.native_layer = as_layer(weights)

    def forward(
        self, hidden_states: Tensor, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> Tensor:
        """Return ``[1, T, hidden]``; the signature is that of transformers' layers."""
        step = current_step()
        native = native_of(step)
        if step is None or native is None:
            out: Tensor = self.original(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
            return out
        cos, sin = (angles[0].contiguous() for angles in position_embeddings)  # [T, width]
        x = hidden_states[0].contiguous()  # [T, hidden]
        return self.in_pieces(native, step, x, cos, sin)[None]

    def in_pieces(self, native: Native, step: PagedStep, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``[T, hidden]`` for contiguous ``x [T, hidden]``, and ``cos`` and ``sin [T, width]``."""
        y = self._norm(native, x, "attention_norm")
        self._store(native, step, y, cos, sin)
        middle = x + _product(native, self._attend(native, step, y, cos, sin), self.native_layer.linears["o"])
        y = self._norm(native, middle, "mlp_norm")
        gate, up = (_product(native, y, self.native_layer.linears[name]) for name in ("gate", "up"))
        return middle + _product(native, native.silu_mul(gate, up), self.native_layer.linears["down"])

    def store_kv(self, native: Native, step: PagedStep, x: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Store keys and values, as :meth:`in_pieces` does, and compute nothing else."""
        self._store(native, step, self._norm(native, x, "attention_norm"), cos, sin)

    def _attend(self, native: Native, step: PagedStep, y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return ``[T, q_heads * head_dim]``."""
        q = self._turned(native, self._norm(native, self._heads(native, y, "q"), "q_norm"), cos, sin)
        form = self.native_layer.weights.form
        return step.kernels.paged_attention(q, step.caches[self.index], step.rows, form, None).flatten(1)

    def _store(self, native: Native, step: PagedStep, y: Tensor, cos: Tensor, sin: Tensor) -> None:
        k = self._turned(native, self._norm(native, self._heads(native, y, "k"), "k_norm"), cos, sin)
        step.kernels.store_kv(k, self._heads(native, y, "v"), step.caches[self.index], step.rows)

    def _heads(self, native: Native, y: Tensor, name: str) -> Tensor:
        """Return ``[T, heads, head_dim]``."""
        states = _product(native, y, self.native_layer.linears[name])
        return states.view(len(y), -1, self.native_layer.weights.head_dim)

    def _turned(self, native: Native, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.native_layer.weights.rotary:
            native.rotate_(heads, cos, sin)
        return heads

    def _norm(self, native: Native, x: Tensor, name: str) -> Tensor:
        weight = self.native_layer.norms[name]
        return x if weight is None else native.rms_norm(x, weight, self.native_layer.weights.epsilon)


def native_of(step: PagedStep | None) -> Native | None:
    """Return the compiled operations that ``step`` runs on, if it does."""
    return step.kernels.native if step is not None else None


def _product(native: Native, x: Tensor, weights: NativeLinear) -> Tensor:
    if native.is_faster(x.numel() // x.shape[-1], x.dtype):
        return native.linear(x, weights)
    return linear(x, weights.weights.weight, weights.weights.bias)

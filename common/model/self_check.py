"""Compares, at load, what the paged path computes with what transformers computes without it.

A few tokens are run with the model's own plain attention, then on paged KV, cut in two and packed beside another
sequence. The logits must agree. That refuses a model whose result depends on something that does not live in the KV
blocks (a recurrent state, a convolution over neighbours, positions counted in the row), and serves no wrong tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import UnsupportedModel
from common.model.batch import Row, build_step
from common.model.loaded import LoadedModel
from common.model.runner import ModelRunner
from kernels.layer_kv import LayerKV

_BLOCK_SIZE = 4
_LENGTH = 7
_CUT = 3
_LIMIT = 0.01
_LIMIT_16_BITS = 0.15
"""Mean difference over the logits' deviation. Rounding alone gives 0.03 for 30 layers in bfloat16, 1e-6 in float32."""


@torch.inference_mode()
def reference_logits(model: PreTrainedModel) -> Tensor:
    """Return ``[2, vocab]`` float32: the logits behind the two sequences, by the model's own attention."""
    rows = [
        model(input_ids=torch.tensor([token_ids], device=model.device), use_cache=False).logits[0, -1]
        for token_ids in _sequences(model.config.get_text_config().vocab_size)
    ]
    return torch.stack(rows).float()


def check_paged(loaded: LoadedModel, expected: Tensor) -> None:
    """Raise UnsupportedModel unless the paged path gives the ``expected`` logits of :func:`reference_logits`."""
    first, second = _sequences(loaded.spec.vocab_size)
    tables = [[3, 0], [1, 2]]
    kernels = "cpu" if loaded.spec.device.type == "cpu" else "eager"
    runner = ModelRunner(loaded, _new_caches(loaded, num_blocks=4), _BLOCK_SIZE, kernels)
    steps = (
        [Row(second[:1], 0, tables[1], False), Row(first[:_CUT], 0, tables[0], False)],
        [Row(first[_CUT:], _CUT, tables[0], True), Row(second[1:], 1, tables[1], True)],
    )
    for rows in steps:
        logits = runner.forward(build_step(rows, _BLOCK_SIZE))
    error = float((logits - expected).abs().mean() / expected.std())
    limit = _LIMIT if loaded.spec.dtype == torch.float32 else _LIMIT_16_BITS
    if not error <= limit:
        raise UnsupportedModel(
            f"{type(loaded.module).__name__} gives other logits on paged KV than by itself "
            f"(relative difference {error:.3g}, limit {limit}); it may keep state outside its attention layers"
        )


def _sequences(vocab_size: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the two sequences of the check, every token different from its neighbours."""
    step = vocab_size // 17 or 1
    tokens = [(5 + index * step) % vocab_size for index in range(2 * _LENGTH)]
    return tokens[:_LENGTH], tokens[_LENGTH:]


def _new_caches(loaded: LoadedModel, num_blocks: int) -> list[LayerKV]:
    def zeros(heads: int, dim: int) -> Tensor:
        shape = (num_blocks, heads, _BLOCK_SIZE, dim)
        return torch.zeros(shape, dtype=loaded.spec.dtype, device=loaded.spec.device)

    return [LayerKV(zeros(s.kv_heads, s.k_dim), zeros(s.kv_heads, s.v_dim)) for s in loaded.spec.layers]

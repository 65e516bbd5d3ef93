"""Runs one step of the model: tokens in, logits out, keys and values into the paged pool on the way.

One thread calls it. It keeps nothing from step to step; what a sequence has computed is in its blocks.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.model.attention import PagedStep, attending
from common.model.batch import Row, StepInput, build_step
from common.model.loaded import LoadedModel
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows
from kernels.select import choose_kernels


class ModelRunner:
    """A loaded model bound to the pool that it writes to. ``kernels`` is a name for :func:`choose_kernels`."""

    def __init__(self, loaded: LoadedModel, layers: Sequence[LayerKV], block_size: int, kernels: str = "auto") -> None:
        if len(layers) != len(loaded.spec.layers):
            raise ValueError(f"the model has {len(loaded.spec.layers)} layers, the pool {len(layers)}")
        self._module = loaded.module
        self._attention = loaded.attention
        self._device = loaded.spec.device
        self._caches = tuple(layers)
        self._block_size = block_size
        self.kernels = choose_kernels(self._device, kernels)

    @torch.inference_mode()
    def forward(self, step: StepInput) -> Tensor:
        """Compute one step and return ``[R, vocab]`` float32 logits, in the order of the rows that want them."""
        positions = self._tensor(step.positions)
        rows = PackedRows(
            cu_seqlens_q=self._tensor(step.cu_seqlens_q),
            seq_lens=self._tensor(step.seq_lens),
            block_tables=self._tensor(step.block_tables),
            slot_mapping=self._tensor(step.slot_mapping),
        )
        with attending(PagedStep(self.kernels, self._attention, self._caches, rows, positions)):
            output = self._module(
                input_ids=self._tensor(step.token_ids)[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=self._tensor(step.logits_rows),
            )
        logits: Tensor = output.logits[0]  # [R, vocab]
        return logits.float()

    def warm_up(self) -> None:
        """Run a small chunk beside a decode row, so that the first real step compiles and allocates nothing.

        Stores no KV; what it reads is whatever block 0 holds.
        """
        for lengths in ((1,), (2 * self._block_size, 1)):
            rows = [Row([0] * n, 0, [0] * -(-n // self._block_size), wants_logits=True) for n in lengths]
            step = build_step(rows, self._block_size)
            self.forward(replace(step, slot_mapping=np.full_like(step.slot_mapping, -1)))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)

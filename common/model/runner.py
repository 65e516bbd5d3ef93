"""Runs one step of the model: tokens in, logits out, keys and values into the paged pool on the way.

One thread calls it. It keeps nothing from step to step; what a sequence has computed is in its blocks.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.model.attention import PagedStep, attending
from common.model.batch import Row, StepInput, build_step, wanted_part
from common.model.cuda_recorder import CudaRecorder
from common.model.decode_graphs import BATCH_SIZES, DecodeGraphs, Recorder
from common.model.loaded import LoadedModel
from common.model.step_tensors import StepTensors
from common.model.upload import upload
from common.model.wanted_rows import WantedRows
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows
from kernels.select import choose_kernels

log = logging.getLogger(__name__)

_WARM_LENGTH = 1024
"""Tokens of the longest sequence in the warm-up: enough for every way that kernels split a sequence."""


class ModelRunner:
    """A loaded model bound to the pool that it writes to. ``kernels`` is a name for :func:`choose_kernels`."""

    def __init__(self, loaded: LoadedModel, layers: Sequence[LayerKV], block_size: int, kernels: str = "auto") -> None:
        if len(layers) != len(loaded.spec.layers):
            raise ValueError(f"the model has {len(loaded.spec.layers)} layers, the pool {len(layers)}")
        self._module = loaded.module
        self._attention = loaded.attention
        self._narrows = loaded.narrows
        self._straight = loaded.straight
        self._device = loaded.spec.device
        self._max_model_len = loaded.spec.max_model_len
        self._caches = tuple(layers)
        self._block_size = block_size
        self._graphs: DecodeGraphs | None = None
        self.kernels = choose_kernels(self._device, kernels)

    @torch.inference_mode()
    def forward(self, step: StepInput, token_ids: Tensor | None = None) -> Tensor:
        """Compute one step and return ``[R, vocab]`` float32 logits, in the order of the rows that want them.

        ``token_ids [T]`` int64, on the device, stand in for the step's own, which the host does not know yet. On a GPU
        nothing is waited for, and the logits may be overwritten by the next step.
        """
        logits = None if self._graphs is None else self._graphs.run(step, token_ids)
        return self._compute(self._tensors(step, token_ids)) if logits is None else logits

    def warm_up(self) -> None:
        """Run steps of every kind, so that the first real one compiles and allocates nothing; record decode steps.

        Stores no KV; what it reads is whatever block 0 holds.
        """
        long = min(_WARM_LENGTH, self._max_model_len)
        chunk = min(2 * self._block_size, long)
        for kinds in ([(0, 1)], [(0, chunk), (0, 1)], [(long - 1, 1)], [(long - chunk, chunk), (long - 1, 1)]):
            rows = [Row([0] * n, start, [0] * -(-(start + n) // self._block_size), True) for start, n in kinds]
            step = build_step(rows, self._block_size)
            self.forward(replace(step, slot_mapping=np.full_like(step.slot_mapping, -1)))
        if self._device.type == "cuda" and self.kernels.name == "triton":
            self.record(CudaRecorder())

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._device

    @property
    def has_recordings(self) -> bool:
        """Whether decode steps are replayed."""
        return self._graphs is not None

    @torch.inference_mode()
    def record(self, recorder: Recorder, batch_sizes: tuple[int, ...] = BATCH_SIZES) -> None:
        """Record decode steps, to be replayed from now on; a model that cannot be recorded goes on without."""
        max_blocks = min(-(-self._max_model_len // self._block_size), self._caches[0].num_blocks)
        try:
            self._graphs = DecodeGraphs(self._compute, recorder, self._device, max_blocks, batch_sizes)
        except RuntimeError as error:
            log.warning("decode steps are not recorded, and slower for it: %s", error)

    def _compute(self, step: StepTensors) -> Tensor:
        paged = PagedStep(self.kernels, self._attention, self._caches, step.rows, step.positions, step.wanted)
        with attending(paged):
            if self._straight is not None:
                return self._straight(step.token_ids, step.positions).float()
            output = self._module(
                input_ids=step.token_ids[None],
                position_ids=step.positions[None],
                use_cache=False,
                logits_to_keep=0 if step.wanted is None or self._narrows else step.wanted.indices,  # 0: all
            )
        logits: Tensor = output.logits[0]  # [R, vocab]
        return logits.float()

    def _tensors(self, step: StepInput, token_ids: Tensor | None) -> StepTensors:
        part = wanted_part(step)
        wanted = None if part is None else WantedRows(self._tensor(step.logits_rows), self._rows(part))
        if token_ids is None:
            token_ids = self._tensor(step.token_ids)
        return StepTensors(token_ids, self._tensor(step.positions), self._rows(step), wanted)

    def _rows(self, step: StepInput) -> PackedRows:
        return PackedRows(
            cu_seqlens_q=self._tensor(step.cu_seqlens_q),
            seq_lens=self._tensor(step.seq_lens),
            block_tables=self._tensor(step.block_tables),
            slot_mapping=self._tensor(step.slot_mapping),
        )

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return upload(torch.from_numpy(array), self._device)

"""Decode steps as recordings, one a batch size: a replay costs the host one launch instead of hundreds.

A recording reads its inputs from fixed places on the device. A step is copied there, and the recording of the smallest
batch size that holds it is replayed. Rows to spare store nothing (slot -1) and see no keys (length 0).
"""

from bisect import bisect_left
from collections.abc import Callable
from itertools import cycle
from typing import Protocol

import torch
from torch import Tensor

from common.model.batch import StepInput
from common.model.step_tensors import StepTensors
from kernels.packed_rows import PackedRows

BATCH_SIZES = (1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
"""What is recorded; at most a fifth of the rows are spare from 8 on, up to half below."""


class Recording(Protocol):
    """One recorded pass."""

    def replay(self) -> Tensor:
        """Run it on what its inputs hold now; the result is overwritten by the next replay of any recording."""


class Recorder(Protocol):
    """Records passes."""

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Record what ``run`` does; raises RuntimeError when it does something that cannot be recorded."""


class _HostInputs:
    """Where the host writes one step for the device to copy; spare rows store nothing and see no keys."""

    def __init__(self, largest: int, max_blocks: int, *, pinned: bool) -> None:
        self.numbers = torch.zeros(4, largest, dtype=torch.int64, pin_memory=pinned)  # token, position, slot, length
        self._tables = torch.zeros(largest * max_blocks, dtype=torch.int32, pin_memory=pinned)
        self._fill_spare(0, largest)

    def write(self, step: StepInput, size: int) -> Tensor:
        """Write ``step``, and spare rows up to ``size``; return its block tables as ``[S, blocks]``."""
        num_rows, num_blocks = step.block_tables.shape
        for row, values in enumerate((step.token_ids, step.positions, step.slot_mapping, step.seq_lens)):
            self.numbers[row, :num_rows] = torch.from_numpy(values)
        self._fill_spare(num_rows, size)
        tables = self._tables[: num_rows * num_blocks].view(num_rows, num_blocks)
        return tables.copy_(torch.from_numpy(step.block_tables))

    def _fill_spare(self, begin: int, end: int) -> None:
        self.numbers[:, begin:end] = torch.tensor([[0], [0], [-1], [0]])


class DecodeGraphs:
    """The recordings of one model and their inputs. Owned by the model runner; on the compute thread.

    A step may be copied in while the one before still runs on the device, but not the one before that: what the host
    writes lies in one of two places by turns, from which the device copies in its own time.
    """

    def __init__(
        self,
        compute: Callable[[StepTensors], Tensor],
        recorder: Recorder,
        device: torch.device,
        max_blocks: int,
        batch_sizes: tuple[int, ...] = BATCH_SIZES,
    ) -> None:
        self._batch_sizes = batch_sizes
        self._max_blocks = max_blocks
        largest = batch_sizes[-1]
        pinned = device.type == "cuda"
        self._hosts = cycle([_HostInputs(largest, max_blocks, pinned=pinned) for _ in range(2)])
        self._numbers = torch.zeros(4, largest, dtype=torch.int64, device=device)  # token, position, slot, length
        self._tables = torch.zeros(largest, max_blocks, dtype=torch.int32, device=device)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._numbers.copy_(next(self._hosts).numbers)
        self._recordings = {
            size: recorder.record(lambda size=size: compute(self._inputs(size)))  # type: ignore[misc]
            for size in reversed(batch_sizes)  # the largest takes the memory that the others share
        }

    def run(self, step: StepInput, token_ids: Tensor | None = None) -> Tensor | None:
        """Return ``[R, vocab]`` logits, or None when ``step`` is no decode step, or too large.

        ``token_ids [T]``, on the device, stand in for the step's own. The logits are overwritten by the next call.
        """
        num_rows, num_blocks = step.block_tables.shape
        if not num_rows == len(step.token_ids) == len(step.logits_rows):
            return None
        if num_rows > self._batch_sizes[-1] or num_blocks > self._max_blocks:
            return None
        size = self._batch_sizes[bisect_left(self._batch_sizes, num_rows)]
        self._write(step, size, token_ids)
        return self._recordings[size].replay()[:num_rows]

    def _write(self, step: StepInput, size: int, token_ids: Tensor | None) -> None:
        num_rows, num_blocks = step.block_tables.shape
        host = next(self._hosts)
        tables = host.write(step, size)
        self._numbers.copy_(host.numbers, non_blocking=True)  # whole: a part of each row would not be one copy
        self._tables[:num_rows, :num_blocks].copy_(tables, non_blocking=True)
        if token_ids is not None:
            self._numbers[0, :num_rows].copy_(token_ids)

    def _inputs(self, size: int) -> StepTensors:
        token_ids, positions, slots, lengths = self._numbers[:, :size]
        rows = PackedRows(
            cu_seqlens_q=self._starts[: size + 1],
            seq_lens=lengths.int(),
            block_tables=self._tables[:size],
            slot_mapping=slots,
        )
        return StepTensors(token_ids, positions, rows, wanted=None)

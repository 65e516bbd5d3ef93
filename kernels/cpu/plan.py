"""What the CPU kernels work out once a step and use in every layer."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows

LONGEST_ROW = 4
"""A sequence with at most this many queries is attended row by row, a longer one as a chunk by matrix products."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Many queries of one sequence."""

    table: NDArray[np.int32]
    begin: int
    """First row in the packed dimension."""
    end: int
    position: int
    """Position of the first query."""


@dataclass(frozen=True, slots=True, eq=False)
class CpuPlan:
    """One step, split into single rows and chunks."""

    rows: PackedRows
    slots: NDArray[np.int64]
    """``[T]``"""
    tables: NDArray[np.int32]
    """``[S, max_blocks]``"""
    row_ids: NDArray[np.int64]
    """``[N]`` packed rows that are attended one by one."""
    sequences: NDArray[np.int64]
    """``[N]`` the sequence of each."""
    positions: NDArray[np.int64]
    """``[N]`` the position of each."""
    chunks: tuple[Chunk, ...]

    @classmethod
    def of(cls, rows: PackedRows, num_blocks: int, block_size: int) -> "CpuPlan":
        """Split ``rows``; raises ValueError when a table or slot points outside the pool, before memory is touched."""
        tables, slots, seq_lens = rows.block_tables.numpy(), rows.slot_mapping.numpy(), rows.seq_lens.numpy()
        _check(tables, slots, seq_lens, num_blocks, block_size)
        row_ids: list[int] = []
        sequences: list[int] = []
        positions: list[int] = []
        chunks: list[Chunk] = []
        bounds = pairwise(rows.cu_seqlens_q.tolist())
        for index, ((begin, end), seq_len) in enumerate(zip(bounds, seq_lens.tolist(), strict=True)):
            if end - begin > LONGEST_ROW:
                chunks.append(Chunk(tables[index], begin, end, seq_len - (end - begin)))
                continue
            row_ids += range(begin, end)
            sequences += [index] * (end - begin)
            positions += range(seq_len - (end - begin), seq_len)
        singles = [np.array(numbers, dtype=np.int64) for numbers in (row_ids, sequences, positions)]
        return cls(rows, slots, tables, singles[0], singles[1], singles[2], tuple(chunks))


def _check(
    tables: NDArray[np.int32],
    slots: NDArray[np.int64],
    seq_lens: NDArray[np.int32],
    num_blocks: int,
    block_size: int,
) -> None:
    needed = np.arange(tables.shape[1]) < -(-seq_lens // block_size)[:, None]
    if seq_lens.max(initial=0) > tables.shape[1] * block_size or (tables[needed] < 0).any():
        raise ValueError("a block table does not cover its sequence")
    if tables.max(initial=-1) >= num_blocks or slots.max(initial=-1) >= num_blocks * block_size:
        raise ValueError(f"a block table or slot names a block outside the pool of {num_blocks}")


class LastPlan:
    """Keeps the plan of the step that runs: all layers of a step come with the same rows. For one thread."""

    def __init__(self) -> None:
        self._plan: CpuPlan | None = None

    def of(self, rows: PackedRows, kv: LayerKV) -> CpuPlan:
        """Return the plan of ``rows``, made at their first use."""
        if self._plan is None or self._plan.rows is not rows:
            self._plan = CpuPlan.of(rows, kv.num_blocks, kv.block_size)
        return self._plan

"""From scheduled pieces of sequences to the arrays of one step.

All pieces lie behind each other in one packed row of T tokens. Knows nothing of requests, schedulers or devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one sequence to compute in one step, at the positions from ``start`` on."""

    token_ids: Sequence[int]
    """At least one."""
    start: int
    """Tokens of the sequence whose KV is already in its blocks."""
    block_ids: Sequence[int]
    """The sequence's whole block table, which must cover the new tokens."""
    wants_logits: bool
    """Return the logits behind the last token."""
    wants_all_logits: bool = False
    """Return the logits behind every token."""

    @property
    def num_logits(self) -> int:
        """Rows of logits that the row gives."""
        return len(self.token_ids) if self.wants_all_logits else int(self.wants_logits)


@dataclass(frozen=True, slots=True, eq=False)
class StepInput:
    """One step over S sequences and T tokens, R of the tokens wanting logits."""

    token_ids: NDArray[np.int64]
    """``[T]``"""
    positions: NDArray[np.int64]
    """``[T]`` position of each token in its sequence."""
    slot_mapping: NDArray[np.int64]
    """``[T]`` ``block_id * block_size + offset`` where a token's KV goes; -1 stores nothing."""
    cu_seqlens_q: NDArray[np.int32]
    """``[S + 1]`` tokens before each sequence."""
    seq_lens: NDArray[np.int32]
    """``[S]`` keys of each sequence, new ones included."""
    block_tables: NDArray[np.int32]
    """``[S, max_blocks]`` block ids, -1 past the end of a sequence."""
    logits_rows: NDArray[np.int64]
    """``[R]`` indices into T, in the order of the sequences; a sequence's rows are its last tokens."""


def wanted_part(step: StepInput) -> StepInput | None:
    """Return the step of the tokens whose logits are wanted, once the KV of all is in place; None when these are all.

    It stores nothing: its slots are -1.
    """
    num_wanted = len(step.logits_rows)
    if num_wanted == len(step.token_ids):
        return None
    sequence = np.searchsorted(step.cu_seqlens_q, step.logits_rows, side="right") - 1  # [R]
    counts = np.bincount(sequence, minlength=len(step.seq_lens))
    kept = counts > 0
    return StepInput(
        token_ids=step.token_ids[step.logits_rows],
        positions=step.positions[step.logits_rows],
        slot_mapping=np.full(num_wanted, -1, dtype=np.int64),
        cu_seqlens_q=np.concatenate(([0], counts[kept].cumsum())).astype(np.int32),
        seq_lens=step.seq_lens[kept],
        block_tables=step.block_tables[kept],
        logits_rows=np.arange(num_wanted),
    )


def build_step(rows: Sequence[Row], block_size: int) -> StepInput:
    """Pack ``rows``; raises ValueError when there is none, one is empty, or a table does not cover its tokens."""
    if not rows or not all(len(row.token_ids) for row in rows):
        raise ValueError("a step needs at least one row, and each row at least one token")
    lengths = np.array([len(row.token_ids) for row in rows])
    starts = np.array([row.start for row in rows])
    seq_lens = starts + lengths
    tables = _pad(rows, seq_lens, block_size)
    ends = np.cumsum(lengths)
    sequence = np.repeat(np.arange(len(rows)), lengths)  # [T]
    positions = np.arange(ends[-1]) - np.repeat(ends - seq_lens, lengths)
    blocks = tables[sequence, positions // block_size].astype(np.int64)
    return StepInput(
        token_ids=np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows]),
        positions=positions,
        slot_mapping=blocks * block_size + positions % block_size,
        cu_seqlens_q=np.concatenate(([0], ends)).astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_tables=tables,
        logits_rows=_logits_rows(rows, ends),
    )


def _logits_rows(rows: Sequence[Row], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``[R]`` the packed index of each token whose logits are wanted; row ``i`` ends before ``ends[i]``."""
    counts = np.array([row.num_logits for row in rows])
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts), counts)  # -count .. -1 in each row
    return np.asarray(np.repeat(ends, counts) + offsets)


def _pad(rows: Sequence[Row], seq_lens: NDArray[np.int64], block_size: int) -> NDArray[np.int32]:
    """Return the needed part of every block table as ``[S, max_blocks]``, padded with -1."""
    num_blocks = -(-seq_lens // block_size)
    tables = np.full((len(rows), int(num_blocks.max())), -1, dtype=np.int32)
    for index, (row, needed) in enumerate(zip(rows, num_blocks.tolist(), strict=True)):
        if len(row.block_ids) < needed:
            raise ValueError(f"{seq_lens[index]} tokens need {needed} blocks, the table has {len(row.block_ids)}")
        tables[index, :needed] = row.block_ids[:needed]
    return tables

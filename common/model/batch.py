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
    """Pack ``rows``; raises ValueError when there is none, one is empty, or a table does not cover its tokens.

    Plain lists, and one array of each at the end: for a step of few tokens that takes half the time of many small array
    operations, whose code has left the processor's caches since the last step.
    """
    if not rows or not all(len(row.token_ids) for row in rows):
        raise ValueError("a step needs at least one row, and each row at least one token")
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    ends: list[int] = [0]
    logits_rows: list[int] = []
    for row in rows:
        placed = range(row.start, row.start + len(row.token_ids))
        _check_table(row, placed.stop, block_size)
        token_ids += row.token_ids
        positions += placed
        slots += [row.block_ids[at // block_size] * block_size + at % block_size for at in placed]
        ends.append(len(token_ids))
        logits_rows += range(ends[-1] - row.num_logits, ends[-1])
    seq_lens = [row.start + len(row.token_ids) for row in rows]
    return StepInput(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=np.array(positions, dtype=np.int64),
        slot_mapping=np.array(slots, dtype=np.int64),
        cu_seqlens_q=np.array(ends, dtype=np.int32),
        seq_lens=np.array(seq_lens, dtype=np.int32),
        block_tables=_tables(rows, [-(-length // block_size) for length in seq_lens]),
        logits_rows=np.array(logits_rows, dtype=np.int64),
    )


def _check_table(row: Row, num_tokens: int, block_size: int) -> None:
    needed = -(-num_tokens // block_size)
    if len(row.block_ids) < needed:
        raise ValueError(f"{num_tokens} tokens need {needed} blocks, the table has {len(row.block_ids)}")


def _tables(rows: Sequence[Row], num_blocks: Sequence[int]) -> NDArray[np.int32]:
    """Return the first ``num_blocks`` entries of every block table as ``[S, max_blocks]``, padded with -1."""
    tables = np.full((len(rows), max(num_blocks)), -1, dtype=np.int32)
    for table, row, needed in zip(tables, rows, num_blocks, strict=True):
        table[:needed] = row.block_ids[:needed]
    return tables

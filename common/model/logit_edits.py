"""What parameters do to a row of logits before it is sampled: bias, penalties, and tokens that are forbidden.

In this order: ``allowed_token_ids``, ``logit_bias``, repetition, presence and frequency penalties, bad words, and ends
before ``min_tokens``. Where the last two would leave no token at all, they are not applied. Tokens that the row's
grammar does not allow are out before all of these.
"""

import numpy as np
from numpy.typing import NDArray

from common.model.history import TokenHistory
from common.sampling import SamplingParams

Row = NDArray[np.float64]


def has_edits(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether :func:`edit` would change anything."""
    return bool(
        params.logit_bias or params.allowed_token_ids or params.reads_history or num_output_tokens < params.min_tokens
    )


def edit(row: Row, params: SamplingParams, num_output_tokens: int, history: TokenHistory | None) -> None:
    """Change ``row [vocab]`` in place. ``history`` must be given when the parameters read it."""
    if params.allowed_token_ids:
        _keep_only(row, np.array(params.allowed_token_ids))
    if params.logit_bias:
        ids = np.array([token_id for token_id, _ in params.logit_bias])
        row[ids] += np.array([bias for _, bias in params.logit_bias])
    if history is not None and params.reads_history:
        _penalise(row, params, history)
    forbidden = _forbidden(params, num_output_tokens, history)
    if forbidden:
        _forbid(row, np.array(sorted(forbidden)))


def _keep_only(row: Row, ids: NDArray[np.int64]) -> None:
    kept = row[ids]
    row.fill(-np.inf)
    row[ids] = kept


def _penalise(row: Row, params: SamplingParams, history: TokenHistory) -> None:
    ids, counts = history.ids, history.output_counts
    values = row[ids]
    if params.repetition_penalty != 1:
        values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    row[ids] = values


def _forbidden(params: SamplingParams, num_output_tokens: int, history: TokenHistory | None) -> set[int]:
    found: set[int] = set()
    if num_output_tokens < params.min_tokens:
        found.update(params.eos_token_ids, params.stop_token_ids)
    if history is not None:
        for *before, last in params.bad_words:
            if not before or history.output_ids[-len(before) :] == before:
                found.add(last)
    return found


def _forbid(row: Row, ids: NDArray[np.int64]) -> None:
    kept = row[ids]
    row[ids] = -np.inf
    if row.max() == -np.inf:
        row[ids] = kept

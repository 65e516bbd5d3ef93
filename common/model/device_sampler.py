"""Samples rows of logits on the GPU that computed them: the same rule as :mod:`common.model.sampler`, in float64 too.

Knows temperature, top-k, top-p, min-p and the penalties; rows with other parameters are left to the CPU.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.model.sample_row import SampleRow
from common.model.upload import upload
from common.sampling import noise_key
from kernels.gpu.sample_rows import Penalties, penalise_rows, sample_rows


def can_sample(row: SampleRow) -> bool:
    """Say whether :func:`sample_on_device` knows all that ``row`` asks for."""
    params = row.params
    return not (
        params.typical_p < 1
        or params.logit_bias
        or params.allowed_token_ids
        or params.bad_words
        or row.allowed is not None
        or row.num_output_tokens < params.min_tokens
    )


def sample_on_device(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return ``[R]`` int64, a token for each row of ``logits [R, vocab]`` float32, without waiting for them.

    Every row must be one that it :func:`can_sample`; -1 for one that has NaN or no finite entry.
    """
    scores = logits.contiguous()
    numbers = torch.tensor([_numbers(row) for row in rows], dtype=torch.float64)
    keys = np.array([noise_key(row.params.seed, row.sample_index, row.position) for row in rows], dtype=np.uint64)
    if any(row.params.reads_history for row in rows):
        scores = scores.double()
        penalise_rows(scores, _penalties(rows, scores.device))
    bits = torch.from_numpy(keys.view(np.int64))
    return sample_rows(scores, upload(numbers, scores.device), upload(bits, scores.device))


def _numbers(row: SampleRow) -> tuple[float, ...]:
    params = row.params
    if params.temperature == 0:
        return (0.0, 0.0, 1.0, 0.0)
    return (params.temperature, params.top_k, params.top_p, params.min_p)


def _penalties(rows: Sequence[SampleRow], device: torch.device) -> Penalties:
    histories = [row.history if row.params.reads_history else None for row in rows]
    width = max(len(history.ids) for history in histories if history is not None)
    ids = np.full((len(rows), width), -1, dtype=np.int64)
    counts = np.zeros((len(rows), width))
    for index, history in enumerate(histories):
        if history is not None:
            ids[index, : len(history.ids)] = history.ids
            counts[index, : len(history.ids)] = history.output_counts
    factors = [
        (row.params.repetition_penalty, row.params.presence_penalty, row.params.frequency_penalty) for row in rows
    ]
    return Penalties(
        upload(torch.from_numpy(ids), device),
        upload(torch.from_numpy(counts), device),
        upload(torch.tensor(factors, dtype=torch.float64), device),
    )

"""From logits to token ids: temperature, top-k, top-p, one uniform number, inverse CDF.

A token depends on its own row, parameters, seed, sample index and position alone. So weights are float64 on the CPU,
summed row by row in the order of token ids, whatever else is in the batch.

Kept are the ``top_k`` most likely tokens, and of these the smallest set, most likely first, that holds ``top_p`` of
their weight; a token as likely as the last one kept is kept too. The chosen token is the first whose running sum
of kept weights exceeds ``u`` times the total.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import InternalError
from common.sampling import SamplingParams, uniform

_HEAD = 512
"""Most likely tokens that are looked at before a whole row is sorted."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """How one row of logits becomes a token."""

    params: SamplingParams
    sample_index: int
    """Number of the parallel sample of the prompt."""
    position: int
    """Tokens before the one to sample."""


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Return one token id for each row of ``logits [R, vocab]`` float32.

    Raises InternalError when a row has NaN or no finite entry.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits, parameters for {len(rows)}")
    if not rows:
        return []
    best, token_ids = logits.max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        raise InternalError("the model's logits are not finite")
    chosen: list[int] = token_ids.tolist()
    random = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if random:
        picked = _sample_random(logits[random].cpu(), best[random].cpu(), [rows[index] for index in random])
        for index, token_id in zip(random, picked, strict=True):
            chosen[index] = token_id
    return chosen


def _sample_random(logits: Tensor, best: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Sample ``logits [R, vocab]``, whose row maxima are ``best [R]``, at temperatures above 0."""
    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float64)
    weights = ((logits.double() - best.double()[:, None]) / temperatures[:, None]).exp_()  # [R, vocab], largest 1
    for index, row in enumerate(rows):
        floor = _least_kept(weights[index], row.params)
        if floor > 0:
            weights[index].masked_fill_(weights[index] < floor, 0.0)
    running = weights.cumsum(dim=-1)
    totals = running[:, -1:]
    numbers = torch.tensor(
        [[uniform(row.params.seed, row.sample_index, row.position)] for row in rows], dtype=torch.float64
    )
    targets = torch.minimum(numbers * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    token_ids: list[int] = torch.searchsorted(running, targets, right=True)[:, 0].tolist()
    return token_ids


def _least_kept(weights: Tensor, params: SamplingParams) -> float:
    """Return the smallest weight of ``weights [vocab]`` that top-k and top-p keep; 0 keeps everything."""
    vocab = weights.shape[0]
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    if not top_k and params.top_p >= 1:
        return 0.0
    head = min(vocab, max(_HEAD, top_k))
    ordered = weights.topk(head).values  # descending
    floor = float(ordered[top_k - 1]) if top_k else 0.0
    if params.top_p >= 1:
        return floor
    total = float(torch.where(weights >= floor, weights, 0.0).cumsum(0)[-1])
    nucleus = _nucleus_floor(ordered, params.top_p * total)
    if nucleus is None:
        nucleus = _nucleus_floor(weights.sort(descending=True).values, params.top_p * total)
    return max(floor, nucleus or 0.0)


def _nucleus_floor(ordered: Tensor, mass: float) -> float | None:
    """Return the weight at which the running sum of ``ordered`` reaches ``mass``, or None when it does not."""
    reached = int(torch.searchsorted(ordered.cumsum(0), mass))
    return float(ordered[reached]) if reached < ordered.shape[0] else None

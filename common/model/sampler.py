"""From logits to token ids: temperature, top-k, top-p, one uniform number, inverse CDF.

A token depends on its own row, parameters, seed, sample index and position alone. So each row is worked on by itself,
in float64 on the CPU; a row of 50,000 logits then also stays in the cache, where a whole batch does not.

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

_BUCKETS_A_NAT = 32
_NUM_BUCKETS = 64 * _BUCKETS_A_NAT
"""Weights are put into buckets by their logarithm, to find where top-p cuts without sorting them all."""


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
    for index, row in enumerate(rows):
        if row.params.temperature > 0:
            chosen[index] = _draw(logits[index].double().cpu(), row)
    return chosen


def _draw(logits: Tensor, row: SampleRow) -> int:
    """Return the token for ``logits [vocab]`` float64, which are overwritten, at a temperature above 0."""
    params = row.params
    scaled = logits.sub_(logits.max()).div_(params.temperature)  # [vocab], largest 0
    weights = scaled.exp()
    if 0 < params.top_k < weights.shape[0]:
        weights = _keep_from(weights, weights.topk(params.top_k).values[-1])
    if params.top_p < 1:
        weights = _keep_from(weights, _nucleus_floor(weights, scaled, params.top_p))
    running = weights.cumsum(0)
    total = running[-1]
    target = uniform(params.seed, row.sample_index, row.position) * total
    below = torch.nextafter(total, torch.zeros_like(total))  # in case that the product was rounded up
    return int(torch.searchsorted(running, torch.minimum(target, below), right=True))


def _keep_from(weights: Tensor, floor: Tensor) -> Tensor:
    """Return ``weights [vocab]`` with those below ``floor`` set to 0."""
    return torch.where(weights >= floor, weights, 0.0)


def _nucleus_floor(weights: Tensor, scaled: Tensor, top_p: float) -> Tensor:
    """Return the least weight among the largest that together hold ``top_p`` of ``weights [vocab]``.

    ``scaled [vocab]`` are the weights' logarithms. Whole buckets are summed first; only the one in which the sum
    reaches its goal is sorted.
    """
    buckets = (scaled * -_BUCKETS_A_NAT).clamp_(max=_NUM_BUCKETS - 1).long()  # largest weights in bucket 0
    running = torch.bincount(buckets, weights=weights, minlength=_NUM_BUCKETS).cumsum(0)
    goal = running[-1] * top_p
    crossing = torch.searchsorted(running, goal)
    inside = weights[buckets == crossing].sort(descending=True).values
    before = running[crossing - 1] if crossing > 0 else 0.0
    reached = torch.searchsorted(inside.cumsum(0) + before, goal)
    return inside[reached.clamp(max=inside.shape[0] - 1)]

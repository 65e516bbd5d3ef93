"""From logits to token ids: edits, temperature, what is kept, and a race of the kept tokens.

A token depends on its own row, parameters, history, seed, sample index and position alone. So each row is worked on by
itself, in float64 on the CPU; a row of 50,000 logits then also stays in the cache, where a whole batch does not.

Kept are the ``top_k`` most likely tokens; of these the smallest set, most likely first, that holds ``top_p`` of their
weight; of these the ones with at least ``min_p`` of the largest weight; of these the smallest set, closest to the
entropy first, that holds ``typical_p`` (Meister et al., Locally Typical Sampling). A token as good as the last one kept
is kept too. Which of the kept tokens is chosen :mod:`common.model.race` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.errors import InternalError
from common.model.logit_edits import edit, has_edits
from common.model.race import race
from common.model.sample_row import SampleRow
from common.model.sampled_ids import SampledIds
from common.model.upload import upload
from common.sampling import SamplingParams, noise_key

_ROWS = 64
"""Scores stand in so many rows when the largest are looked for."""

_LARGE = 1e-4
"""Share of the total from which on a weight is tried first when the nucleus is looked for."""

_WITHOUT_BRANCHES = np.array([-np.inf, 0.0])
"""What is added to the score of a token that is not allowed, and of one that is: looked up, since a condition that is
true here and there costs ten times as much."""

Floats = NDArray[np.float64]


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """Return one token id for each row of ``logits [R, vocab]`` float32.

    Raises InternalError when a row has NaN or no finite entry.
    """
    return start_sampling(logits, rows).tolist()


@torch.inference_mode()
def start_sampling(logits: Tensor, rows: Sequence[SampleRow]) -> SampledIds:
    """Sample as :func:`sample` does; what a GPU samples may not be known yet when this returns.

    ``logits`` may be overwritten by work that is launched after it.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits, parameters for {len(rows)}")
    if rows and logits.device.type == "cuda":
        return SampledIds(_sample_on_gpu(logits, rows))
    host = logits.cpu().numpy()  # [R, vocab]
    return SampledIds(
        torch.tensor([_sample_row(host[index], row) for index, row in enumerate(rows)], dtype=torch.int64)
    )


def _sample_on_gpu(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Return ``[R]`` tokens: sampled there what can be sampled there, and the other rows here."""
    from common.model.device_sampler import can_sample, sample_on_device  # loads triton

    if all(_is_plainly_greedy(row) for row in rows):
        return _greedy(logits)
    there = [index for index, row in enumerate(rows) if can_sample(row)]
    if len(there) == len(rows):
        return sample_on_device(logits, rows)
    tokens = torch.empty(len(rows), dtype=torch.int64)
    for index in set(range(len(rows))).difference(there):
        tokens[index] = _sample_row(logits[index].cpu().numpy(), rows[index])
    tokens = upload(tokens, logits.device)
    if there:
        at = upload(torch.tensor(there), logits.device)
        tokens[at] = sample_on_device(logits[at], [rows[index] for index in there])
    return tokens


def _greedy(logits: Tensor) -> Tensor:
    best, token_ids = logits.max(dim=-1)
    return torch.where(torch.isfinite(best), token_ids, -1)


def _is_plainly_greedy(row: SampleRow) -> bool:
    return row.params.temperature == 0 and row.allowed is None and not has_edits(row.params, row.num_output_tokens)


def _sample_row(logits: NDArray[np.float32], row: SampleRow) -> int:
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise InternalError("the model's logits are not finite")
    if _is_plainly_greedy(row):
        return best
    scores = logits.astype(np.float64)
    if row.allowed is not None:
        scores += _WITHOUT_BRANCHES[row.allowed.view(np.uint8)]
    if has_edits(row.params, row.num_output_tokens):
        edit(scores, row.params, row.num_output_tokens, row.history)
    best = int(scores.argmax())
    return best if row.params.temperature == 0 else _draw(scores, float(scores[best]), row)


def _draw(scores: Floats, best: float, row: SampleRow) -> int:
    """Return the token for ``scores [vocab]``, which are overwritten, at a temperature above 0."""
    kept = _kept(scores, best, row.params, None if row.allowed is None else np.flatnonzero(row.allowed))
    at = race(kept.weights, kept.ids, noise_key(row.params.seed, row.sample_index, row.position))
    return at if kept.ids is None else int(kept.ids[at])


@dataclass(frozen=True, slots=True)
class _Kept:
    """Tokens that may be chosen, in order of their ids."""

    weights: Floats
    """``[K]`` probabilities up to a common factor."""
    ids: NDArray[np.int64] | None = None
    """``[K]``; None: all tokens."""

    def where(self, mask: NDArray[np.bool_]) -> "_Kept":
        """Return the tokens for which ``mask [K]`` is true."""
        at = np.flatnonzero(mask)
        return _Kept(self.weights[at], at if self.ids is None else self.ids[at])


def _kept(scores: Floats, best: float, params: SamplingParams, ids: NDArray[np.int64] | None) -> _Kept:
    """Return what may be chosen of the tokens ``ids``, None: of all."""
    if ids is not None:
        scores = scores[ids]
    scores -= best
    if params.temperature != 1:
        with np.errstate(over="ignore"):
            scores /= params.temperature  # the largest is 0
    if 0 < params.top_k < len(scores):
        at = _largest(scores, params.top_k)
        scores, ids = scores[at], at if ids is None else ids[at]
    kept = _Kept(np.exp(scores), ids)
    if params.top_p < 1:
        kept = kept.where(kept.weights >= _nucleus_floor(kept.weights, params.top_p))
    if params.min_p > 0:
        kept = kept.where(kept.weights >= params.min_p)
    if params.typical_p < 1:
        kept = kept.where(_is_typical(kept.weights, params.typical_p))
    return kept


def _largest(scores: Floats, count: int) -> NDArray[np.int64]:
    """Return where the ``count`` largest of ``scores [K]`` are, and what equals the last of them, in order.

    Few are compared with each other: ``count`` columns have one that is at least the ``count``-th of their maxima.
    """
    columns = len(scores) // _ROWS
    if count > columns:
        return np.flatnonzero(scores >= np.partition(scores, -count)[-count])
    highest = scores[: columns * _ROWS].reshape(_ROWS, columns).max(axis=0)
    at = np.flatnonzero(scores >= np.partition(highest, -count)[-count])
    large = scores[at]
    largest: NDArray[np.int64] = at[large >= np.partition(large, -count)[-count]]
    return largest


def _nucleus_floor(weights: Floats, top_p: float) -> float:
    """Return the least weight among the largest that together hold ``top_p`` of ``weights [K]``.

    Only the large weights are sorted: so many that they hold ``top_p``, found in a few tries.
    """
    total = float(weights.sum())
    goal = total * top_p
    for floor in (_LARGE * total, 0.5 * (total - goal) / len(weights), 0.0):
        large = weights[weights >= floor]
        if large.sum() >= goal or floor == 0:
            break
    large[::-1].sort()
    reached = int(np.searchsorted(large.cumsum(), goal))
    return float(large[min(reached, len(large) - 1)])


def _is_typical(weights: Floats, typical_p: float) -> NDArray[np.bool_]:
    """Say which tokens of ``weights [K]`` are the ones closest to the entropy that hold ``typical_p``."""
    probabilities = weights / weights.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = -np.log(probabilities)
        entropy = float(np.where(probabilities > 0, probabilities * surprise, 0.0).sum())
    distance = np.abs(surprise - entropy)  # infinite where the probability is 0
    order = np.argsort(distance)
    reached = int(np.searchsorted(probabilities[order].cumsum(), typical_p))
    farthest = distance[order[min(reached, len(order) - 1)]]
    return np.asarray(distance <= farthest)

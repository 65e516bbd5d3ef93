"""From logits to log probabilities of tokens, in float64 on the CPU, each row by itself."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.logprobs import TokenLogprobs


@torch.inference_mode()
def logprobs_of(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """Return how likely ``token_ids[r]`` is by ``logits[r]``, beside the ``num_top[r]`` most likely tokens.

    ``logits`` is ``[R, vocab]`` float32, unchanged by what sampling does.
    """
    host = logits.cpu().numpy()  # [R, vocab]
    return [_row(row, token_id, top) for row, token_id, top in zip(host, token_ids, num_top, strict=True)]


def _row(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    largest = float(logits.max())
    total = float(np.exp(logits - largest, dtype=np.float64).sum())
    base = largest + float(np.log(total))
    top_ids = _top(logits, num_top)
    return TokenLogprobs(
        float(logits[token_id]) - base,
        int((logits > logits[token_id]).sum()) + 1,
        tuple(top_ids.tolist()),
        tuple((logits[top_ids].astype(np.float64) - base).tolist()),
    )


def _top(logits: NDArray[np.float32], count: int) -> NDArray[np.int64]:
    """Return the ids of the ``count`` largest logits, best first; of equals the lower id."""
    if count == 0:
        return np.empty(0, dtype=np.int64)
    count = min(count, len(logits))
    floor = np.partition(logits, -count)[-count]
    ids = np.flatnonzero(logits >= floor)
    return ids[np.lexsort((ids, -logits[ids]))][:count]

"""Tokens that were sampled, perhaps not yet: a GPU is told what to do and does it later."""

import torch
from torch import Tensor

from common.errors import InternalError


class SampledIds:
    """``ids [R]`` int64, on their way to the host; -1 stands for a row of logits that was not finite."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids
        self._host = ids
        self._copied: torch.cuda.Event | None = None
        if ids.device.type == "cuda":
            self._host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
            self._host.copy_(ids, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def input_ids(self, rows: Tensor) -> Tensor:
        """Return the tokens of ``rows [S]`` as the next step's input, where they were sampled; waits for nothing.

        A row without a token gives token 0: what is computed from it is never used.
        """
        return self._ids[rows].clamp(min=0)

    def tolist(self) -> list[int]:
        """Wait for the tokens and return them; raises InternalError when a row was not finite."""
        if self._copied is not None:
            self._copied.synchronize()
        ids: list[int] = self._host.tolist()
        if ids and min(ids) < 0:
            raise InternalError("the model's logits are not finite")
        return ids

"""Which tokens a sequence has had, as the sampler's penalties and bad words ask for it.

Made from the sequence's tokens alone and brought up to date with each step, so it is the same on whatever worker, after
a hand-over, a fork, a preemption or a move.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_INITIAL_CAPACITY = 256


class TokenHistory:
    """Counts one sequence's tokens. Owned by the sequence; extended and read by the compute thread."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_tokens = 0
        """Tokens seen so far, prompt included."""
        self.output_ids: list[int] = []
        self._num_prompt_tokens = num_prompt_tokens
        self._slots: dict[int, int] = {}
        self._ids = np.empty(_INITIAL_CAPACITY, dtype=np.int64)
        self._counts = np.zeros(_INITIAL_CAPACITY, dtype=np.float64)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that follow those seen so far."""
        num_prompt = min(len(token_ids), max(0, self._num_prompt_tokens - self.num_tokens))
        for token_id in set(token_ids[:num_prompt]):
            self._slot(token_id)
        for token_id in token_ids[num_prompt:]:
            self._counts[self._slot(token_id)] += 1
        self.output_ids += token_ids[num_prompt:]
        self.num_tokens += len(token_ids)

    @property
    def ids(self) -> NDArray[np.int64]:
        """``[U]`` each token of prompt and output once."""
        return self._ids[: len(self._slots)]

    @property
    def output_counts(self) -> NDArray[np.float64]:
        """``[U]`` how often each of ``ids`` is in the output."""
        return self._counts[: len(self._slots)]

    def _slot(self, token_id: int) -> int:
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.empty_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token_id
        return slot

"""What the logits of one step say: the tokens sampled from them, and log probabilities where they are asked for."""

from collections.abc import Sequence as Seq
from itertools import accumulate

import torch
from torch import Tensor

from common.logprobs import TokenLogprobs
from common.messages import SampledToken
from common.model.logprobs import logprobs_of
from common.model.sample_row import SampleRow
from common.model.sampled_ids import SampledIds
from common.model.sampler import start_sampling
from common.model.upload import upload
from kvstore.host.reading import Computed, Reading


class LogitsRead:
    """Reads ``logits [R, vocab]``, the rows of a chunk behind those of the chunk before. On the compute thread.

    On a GPU the tokens may not be known yet when it has been made; the logits may be overwritten then.
    """

    def __init__(self, logits: Tensor, readings: Seq[Reading]) -> None:
        self._readings = readings
        firsts = list(accumulate((reading.row.num_logits for reading in readings), initial=0))
        lasts = [past - 1 for past, reading in zip(firsts[1:], readings, strict=True) for _ in reading.samples]
        self._rows = [row for reading in readings for row in reading.constrained(logits.shape[-1])]
        sampled = _rows(logits, lasts)
        self.sampled: SampledIds = start_sampling(sampled, self._rows)
        self._logprobs = _logprobs(sampled, self._rows, self.sampled)
        self._scores = [_scores(logits, first, reading) for first, reading in zip(firsts, readings, strict=False)]

    def computed(self) -> list[Computed]:
        """Wait for the tokens, and return what became of each chunk.

        Raises InternalError when logits were not finite.
        """
        rows = enumerate(zip(self._rows, self.sampled.tolist(), strict=True))
        tokens = (SampledToken(row.sample_index, token_id, self._logprobs.get(at)) for at, (row, token_id) in rows)
        return [
            reading.computed(tuple(next(tokens) for _ in reading.samples), scores)
            for reading, scores in zip(self._readings, self._scores, strict=True)
        ]


def _rows(logits: Tensor, indices: list[int]) -> Tensor:
    """Return the rows at ``indices``; a copy only when these are not all rows in order."""
    if indices == list(range(len(logits))):
        return logits
    return logits[upload(torch.tensor(indices, dtype=torch.int64), logits.device)]


def _logprobs(logits: Tensor, rows: Seq[SampleRow], sampled: SampledIds) -> dict[int, TokenLogprobs]:
    """Return how likely the sampled token of a row was, by the row's index, for those that ask; waits for the tokens
    if one does."""
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if not asked:
        return {}
    token_ids = sampled.tolist()
    num_top = [rows[index].params.logprobs or 0 for index in asked]
    found = logprobs_of(_rows(logits, asked), [token_ids[index] for index in asked], num_top)
    return dict(zip(asked, found, strict=True))


def _scores(logits: Tensor, first: int, reading: Reading) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of the reading's prompt tokens by the rows of ``logits`` from ``first`` on."""
    count = len(reading.scored_ids)
    if count == 0:
        return ()
    num_top = reading.chunk.sequence.sampling.prompt_logprobs or 0
    return tuple(logprobs_of(logits[first : first + count], reading.scored_ids, [num_top] * count))

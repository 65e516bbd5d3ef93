"""What a step reads in the logits of its chunks: the next tokens of samples, and log probabilities.

What is asked is copied from the sequences before the step, since they may change while it runs.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from common.errors import BatonError
from common.logprobs import TokenLogprobs
from common.messages import SampledToken
from common.model.batch import Row
from common.model.grammar_state import GrammarState
from common.model.history import TokenHistory
from common.model.logprobs import logprobs_of
from common.model.sample_row import SampleRow
from common.model.sampler import sample
from kvstore.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk that was computed, and what its logits said."""

    chunk: Chunk
    tokens: tuple[SampledToken, ...]
    """If it reached the sequence's end: the next token of each sample that goes on there."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """If the sequence wants them: of the prompt's tokens that follow the computed ones."""
    error: BatonError | None = None
    """Why no token could be sampled."""


@dataclass(frozen=True, slots=True)
class _Unseen:
    """Tokens that a history or a grammar's state does not know yet."""

    seen_by: TokenHistory | GrammarState
    token_ids: Seq[int]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one chunk computes, and what is asked of its logits."""

    chunk: Chunk
    row: Row
    samples: tuple[SampleRow, ...] = ()
    """One for each token that follows the last of the chunk."""
    scored_ids: Seq[int] = ()
    """Tokens of the prompt to score, the first by the chunk's first row of logits."""
    unseen: Seq[_Unseen] = ()
    grammar_state: GrammarState | None = None

    def constrained(self, vocab_size: int) -> list[SampleRow]:
        """Return ``samples`` with what the grammar allows next; a GPU still computes the logits meanwhile."""
        for tokens in self.unseen:
            tokens.seen_by.extend(tokens.token_ids)
        if self.grammar_state is None:
            return list(self.samples)
        allowed = self.grammar_state.allowed(vocab_size)
        return [replace(row, allowed=allowed) for row in self.samples]

    def computed(self, tokens: tuple[SampledToken, ...], scores: tuple[TokenLogprobs, ...]) -> Computed:
        """Return the chunk with its ``tokens``, marked where they complete their constraint."""
        state = self.grammar_state
        if state is None:
            return Computed(self.chunk, tokens, scores)
        marked = tuple(
            msgspec.structs.replace(token, is_complete=state.is_complete_with(token.token_id)) for token in tokens
        )
        return Computed(self.chunk, marked if state.error is None else (), scores, state.error)


def reading_of(chunk: Chunk) -> Reading:
    """Return what ``chunk`` computes and asks."""
    sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
    past = start + chunk.num_scheduled_tokens
    scored_ids: Seq[int] = ()
    if sequence.wants_prompt_logprobs:
        scored_ids = sequence.token_ids[start + 1 : min(past + 1, sequence.num_prompt_tokens)]
    samples = chunk.samples and bool(sequence.sample_indices)
    block_ids = tuple(sequence.table.block_ids)
    row = Row(sequence.token_ids[start:past], start, block_ids, samples, wants_all_logits=bool(scored_ids))
    if not samples:
        return Reading(chunk, row, scored_ids=scored_ids)
    rows = tuple(_sample_row(sequence, index) for index in sequence.sample_indices)
    state = _grammar_state(sequence)
    return Reading(chunk, row, rows, scored_ids, _unseen(sequence), state)


def read(logits: Tensor, readings: Seq[Reading]) -> list[Computed]:
    """Return what ``logits [R, vocab]`` say; the rows of a chunk follow those of the chunk before."""
    firsts = list(accumulate((reading.row.num_logits for reading in readings), initial=0))
    lasts = [past - 1 for past, reading in zip(firsts[1:], readings, strict=True) for _ in reading.samples]
    rows = [row for reading in readings for row in reading.constrained(logits.shape[-1])]
    tokens = iter(_next_tokens(_rows(logits, lasts), rows))
    return [
        reading.computed(tuple(next(tokens) for _ in reading.samples), _scores(logits, first, reading))
        for first, reading in zip(firsts, readings, strict=False)
    ]


def _rows(logits: Tensor, indices: list[int]) -> Tensor:
    """Return the rows at ``indices``; a copy only when these are not all rows in order."""
    if indices == list(range(len(logits))):
        return logits
    return logits[torch.tensor(indices, dtype=torch.int64, device=logits.device)]


def _next_tokens(logits: Tensor, rows: Seq[SampleRow]) -> list[SampledToken]:
    """Sample a token by each row of ``logits [R, vocab]``, and say how likely it was where that is asked for."""
    token_ids = sample(logits, rows)
    asked = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    scored_ids = [token_ids[index] for index in asked]
    logprobs = logprobs_of(_rows(logits, asked), scored_ids, [rows[index].params.logprobs or 0 for index in asked])
    known = dict(zip(asked, logprobs, strict=True))
    return [
        SampledToken(row.sample_index, token_id, known.get(index))
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
    ]


def _scores(logits: Tensor, first: int, reading: Reading) -> tuple[TokenLogprobs, ...]:
    """Return the log probabilities of the reading's prompt tokens by the rows of ``logits`` from ``first`` on."""
    count = len(reading.scored_ids)
    if count == 0:
        return ()
    num_top = reading.chunk.sequence.sampling.prompt_logprobs or 0
    return tuple(logprobs_of(logits[first : first + count], reading.scored_ids, [num_top] * count))


def _sample_row(sequence: Sequence, sample_index: int) -> SampleRow:
    if sequence.history is None and sequence.sampling.reads_history:
        sequence.history = TokenHistory(sequence.num_prompt_tokens)
    return SampleRow(
        sequence.sampling,
        sample_index,
        position=sequence.num_tokens,
        num_output_tokens=sequence.num_output_tokens,
        history=sequence.history,
    )


def _grammar_state(sequence: Sequence) -> GrammarState | None:
    if sequence.grammar_state is None and sequence.grammar is not None:
        sequence.grammar_state = GrammarState(sequence.grammar, sequence.sampling.eos_token_ids)
    return sequence.grammar_state


def _unseen(sequence: Sequence) -> list[_Unseen]:
    found: list[_Unseen] = []
    if sequence.history is not None:
        found.append(_Unseen(sequence.history, sequence.token_ids[sequence.history.num_tokens :]))
    if sequence.grammar_state is not None:
        num_seen = sequence.num_prompt_tokens + sequence.grammar_state.num_tokens
        found.append(_Unseen(sequence.grammar_state, sequence.token_ids[num_seen:]))
    return found

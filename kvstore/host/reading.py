"""What a step computes of its chunks and asks of their logits: the next tokens of samples, and log probabilities.

That is copied from the sequences before the step, since they may change while it runs. :mod:`kvstore.host.logits_read`
gives the answers.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import msgspec

from common.errors import BatonError
from common.logprobs import TokenLogprobs
from common.messages import SampledToken
from common.model.batch import Row
from common.model.grammar_state import GrammarState
from common.model.history import TokenHistory
from common.model.sample_row import SampleRow
from kvstore.sequence import Chunk, Sequence

_UNKNOWN = 0
"""Stands for a token that only the device knows."""


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
    follows: int = 0
    """If the step follows one whose tokens are not known: which of that one's tokens is the row's input."""

    def follow(self, token_id: int) -> None:
        """Take the token that the row's input turned out to be."""
        for row in self.samples:
            if row.history is not None:
                row.history.extend((token_id,))
        if self.grammar_state is not None:
            self.grammar_state.extend((token_id,))

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


def readings_ahead(chunks: Seq[Chunk], before: Seq[Reading]) -> list[Reading]:
    """Return what ``chunks`` compute and ask: of each sequence the token that the step of ``before`` samples."""
    sampled = [reading.chunk.sequence for reading in before for _ in reading.samples]
    rows = {sequence: row for row, sequence in enumerate(sampled)}
    return [_reading_ahead(chunk, rows[chunk.sequence]) for chunk in chunks]


def _reading_ahead(chunk: Chunk, follows: int) -> Reading:
    sequence = chunk.sequence
    row = Row([_UNKNOWN], sequence.num_tokens, tuple(sequence.table.block_ids), wants_logits=True)
    (index,) = sequence.sample_indices
    samples = (_sample_row(sequence, index, num_unknown=1),)
    return Reading(chunk, row, samples, grammar_state=sequence.grammar_state, follows=follows)


def _sample_row(sequence: Sequence, sample_index: int, num_unknown: int = 0) -> SampleRow:
    if sequence.history is None and sequence.sampling.reads_history:
        sequence.history = TokenHistory(sequence.num_prompt_tokens)
    return SampleRow(
        sequence.sampling,
        sample_index,
        position=sequence.num_tokens + num_unknown,
        num_output_tokens=sequence.num_output_tokens + num_unknown,
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

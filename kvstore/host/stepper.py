"""Runs scheduled steps on the one compute thread, so that the event loop never waits for torch.

While a step runs it may write to the blocks of its sequences. A sequence that leaves meanwhile keeps its blocks until
the step has ended; then nobody else's bytes can be overwritten.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from common.errors import BatonError, InternalError
from common.model.batch import Row, build_step
from common.model.grammar_state import GrammarState
from common.model.history import TokenHistory
from common.model.runner import ModelRunner
from common.model.sampler import SampleRow, sample
from kvstore.block_table import BlockTable
from kvstore.host.meter import StepMeter
from kvstore.sequence import Chunk, Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")


class ComputeThread:
    """Owns the one thread that touches the model and, through it, the KV tensor."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def call(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def close(self) -> None:
        """Wait for what runs and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk that was computed, and the token that its logits gave if it reached the sequence's end."""

    chunk: Chunk
    token_id: int | None
    is_complete: bool = False
    """The token completes the sequence's constraint."""
    error: BatonError | None = None
    """Why no token could be sampled."""


class Stepper:
    """Runs one engine's steps, one at a time, and gives blocks back when no step can write to them any more."""

    def __init__(self, thread: ComputeThread, runner: ModelRunner, block_size: int) -> None:
        self.meter = StepMeter()
        self._thread = thread
        self._runner = runner
        self._block_size = block_size
        self._in_flight: set[Sequence] = set()
        self._leaving: list[BlockTable] = []

    async def run(self, chunks: Seq[Chunk], before: Callable[[], None] | None = None) -> list[Computed]:
        """Compute ``chunks``; raises InternalError, after logging the cause, when the model could not.

        ``before`` is called first, on the compute thread. What the step reads of the sequences is copied first, so they
        may change while it runs.
        """
        self._in_flight = {chunk.sequence for chunk in chunks}
        self.meter.begin(time.monotonic())
        try:
            return await self._thread.call(self._job(chunks, before))
        except Exception as error:
            log.exception("a step failed")
            raise InternalError("the worker could not compute the sequence") from error
        finally:
            self.meter.end(time.monotonic(), sum(n for chunk in chunks if (n := chunk.num_scheduled_tokens) > 1))
            self._end_flight()

    def release(self, table: BlockTable, sequence: Sequence) -> None:
        """Give back the blocks of a sequence that leaves, now or when the running step has ended."""
        if sequence in self._in_flight:
            self._leaving.append(table)
        else:
            table.release()

    def leaving(self) -> Iterable[BlockTable]:
        """Return the tables that only the running step keeps."""
        return self._leaving

    def _job(self, chunks: Seq[Chunk], before: Callable[[], None] | None) -> Callable[[], list[Computed]]:
        rows = [_row(chunk) for chunk in chunks]
        sampling = [chunk for chunk in chunks if chunk.samples]
        samples = [_sample_row(chunk.sequence) for chunk in sampling]
        states = [_grammar_state(chunk.sequence) for chunk in sampling]
        unseen = [tokens for chunk in sampling for tokens in _unseen(chunk.sequence)]

        def compute() -> list[Computed]:
            if before is not None:
                before()
            logits = self._runner.forward(build_step(rows, self._block_size))  # [len(samples), vocab] float32
            for tokens in unseen:
                tokens.seen_by.extend(tokens.token_ids)
            results = {chunk: Computed(chunk, None) for chunk in chunks}
            token_ids = sample(logits, _constrained(samples, states, logits.shape[-1])) if samples else []
            for chunk, token_id, state in zip(sampling, token_ids, states, strict=True):
                results[chunk] = _computed(chunk, token_id, state)
            return list(results.values())

        return compute

    def _end_flight(self) -> None:
        self._in_flight = set()
        for table in self._leaving:
            table.release()
        self._leaving = []


def _row(chunk: Chunk) -> Row:
    sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
    token_ids = sequence.token_ids[start : start + chunk.num_scheduled_tokens]
    return Row(token_ids, start, tuple(sequence.table.block_ids), chunk.samples)


def _sample_row(sequence: Sequence) -> SampleRow:
    if sequence.history is None and sequence.sampling.reads_history:
        sequence.history = TokenHistory(sequence.num_prompt_tokens)
    return SampleRow(
        sequence.sampling,
        sequence.sample_index,
        position=sequence.num_tokens,
        num_output_tokens=sequence.num_output_tokens,
        history=sequence.history,
    )


def _grammar_state(sequence: Sequence) -> GrammarState | None:
    if sequence.grammar_state is None and sequence.grammar is not None:
        sequence.grammar_state = GrammarState(sequence.grammar, sequence.sampling.eos_token_ids)
    return sequence.grammar_state


@dataclass(frozen=True, slots=True)
class _Unseen:
    """Tokens that a history or a grammar's state does not know yet, copied before the step."""

    seen_by: TokenHistory | GrammarState
    token_ids: Seq[int]


def _unseen(sequence: Sequence) -> list[_Unseen]:
    found: list[_Unseen] = []
    if sequence.history is not None:
        found.append(_Unseen(sequence.history, sequence.token_ids[sequence.history.num_tokens :]))
    if sequence.grammar_state is not None:
        num_seen = sequence.num_prompt_tokens + sequence.grammar_state.num_tokens
        found.append(_Unseen(sequence.grammar_state, sequence.token_ids[num_seen:]))
    return found


def _constrained(rows: Seq[SampleRow], states: Seq[GrammarState | None], vocab_size: int) -> list[SampleRow]:
    """Return ``rows`` with what the grammars allow next; while that is worked out, a GPU still computes the logits."""
    return [
        row if state is None else replace(row, allowed=state.allowed(vocab_size))
        for row, state in zip(rows, states, strict=True)
    ]


def _computed(chunk: Chunk, token_id: int, state: GrammarState | None) -> Computed:
    is_complete = state is not None and state.is_complete_with(token_id)
    if state is not None and state.error is not None:
        return Computed(chunk, None, error=state.error)
    return Computed(chunk, token_id, is_complete)

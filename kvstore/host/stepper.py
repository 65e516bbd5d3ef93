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
from dataclasses import dataclass
from typing import TypeVar

from common.errors import InternalError
from common.model.batch import Row, build_step
from common.model.history import TokenHistory
from common.model.runner import ModelRunner
from common.model.sample_row import SampleRow
from common.model.sampler import sample
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


class Stepper:
    """Runs one engine's steps, one at a time, and gives blocks back when no step can write to them any more."""

    def __init__(self, thread: ComputeThread, runner: ModelRunner, block_size: int) -> None:
        self.meter = StepMeter()
        self._thread = thread
        self._runner = runner
        self._block_size = block_size
        self._in_flight: set[Sequence] = set()
        self._leaving: list[BlockTable] = []

    async def run(self, chunks: Seq[Chunk]) -> list[Computed]:
        """Compute ``chunks``; raises InternalError, after logging the cause, when the model could not.

        What the step reads of the sequences is copied first, so they may change while it runs.
        """
        self._in_flight = {chunk.sequence for chunk in chunks}
        self.meter.begin(time.monotonic())
        samples = [chunk.samples for chunk in chunks]
        try:
            token_ids = iter(await self._thread.call(self._job(chunks)))
        except Exception as error:
            log.exception("a step failed")
            raise InternalError("the worker could not compute the sequence") from error
        finally:
            self.meter.end(time.monotonic(), sum(n for chunk in chunks if (n := chunk.num_scheduled_tokens) > 1))
            self._end_flight()
        return [
            Computed(chunk, next(token_ids) if wants else None) for chunk, wants in zip(chunks, samples, strict=True)
        ]

    def release(self, table: BlockTable, sequence: Sequence) -> None:
        """Give back the blocks of a sequence that leaves, now or when the running step has ended."""
        if sequence in self._in_flight:
            self._leaving.append(table)
        else:
            table.release()

    def leaving(self) -> Iterable[BlockTable]:
        """Return the tables that only the running step keeps."""
        return self._leaving

    def _job(self, chunks: Seq[Chunk]) -> Callable[[], list[int]]:
        rows = [_row(chunk) for chunk in chunks]
        samples = [_sample_row(chunk.sequence) for chunk in chunks if chunk.samples]
        unseen = [_unseen(chunk.sequence) for chunk in chunks if chunk.samples and chunk.sequence.history is not None]

        def compute() -> list[int]:
            for tokens in unseen:
                tokens.history.extend(tokens.token_ids)
            logits = self._runner.forward(build_step(rows, self._block_size))  # [len(samples), vocab] float32
            return sample(logits, samples) if samples else []

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


@dataclass(frozen=True, slots=True)
class _Unseen:
    """Tokens that a history does not know yet, copied before the step."""

    history: TokenHistory
    token_ids: Seq[int]


def _unseen(sequence: Sequence) -> _Unseen:
    assert sequence.history is not None
    return _Unseen(sequence.history, sequence.token_ids[sequence.history.num_tokens :])

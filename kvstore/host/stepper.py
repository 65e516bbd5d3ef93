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
from typing import Protocol, TypeVar

from torch import Tensor

from common.errors import InternalError
from common.model.batch import StepInput, build_step
from kvstore.block_table import BlockTable
from kvstore.host.meter import StepMeter
from kvstore.host.reading import Computed, read, reading_of
from kvstore.sequence import Chunk, Sequence

log = logging.getLogger(__name__)

T = TypeVar("T")


class StepRunner(Protocol):
    """What computes steps: :class:`common.model.runner.ModelRunner`, or something around one."""

    def forward(self, step: StepInput) -> Tensor:
        """Return ``[R, vocab]`` float32 logits, one row for each that the step wants."""


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


class Stepper:
    """Runs one engine's steps, one at a time, and gives blocks back when no step can write to them any more."""

    def __init__(
        self,
        thread: ComputeThread,
        runner: StepRunner,
        block_size: int,
        meter: StepMeter,
        on_step: Callable[[float, int], None] = lambda elapsed_s, num_sequences: None,
    ) -> None:
        self.meter = meter
        self._on_step = on_step
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
        began = time.monotonic()
        self.meter.begin(began)
        try:
            return await self._thread.call(self._job(chunks, before))
        except Exception as error:
            log.exception("a step failed")
            raise InternalError("the worker could not compute the sequence") from error
        finally:
            sizes = [chunk.num_scheduled_tokens for chunk in chunks]
            ended = time.monotonic()
            self._on_step(ended - began, len(chunks))
            self.meter.end(ended, sum(size for size in sizes if size > 1), decodes=1 in sizes)
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
        readings = [reading_of(chunk) for chunk in chunks]

        def compute() -> list[Computed]:
            if before is not None:
                before()
            step = build_step([reading.row for reading in readings], self._block_size)
            return read(self._runner.forward(step), readings)

        return compute

    def _end_flight(self) -> None:
        self._in_flight = set()
        for table in self._leaving:
            table.release()
        self._leaving = []

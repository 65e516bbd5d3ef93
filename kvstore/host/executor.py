"""Runs a scheduled step on the one compute thread, so that the event loop never waits for torch."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from common.model.batch import Row, build_step
from common.model.runner import ModelRunner
from common.model.sampler import SampleRow, sample
from kvstore.sequence import Chunk

T = TypeVar("T")


class Executor:
    """Owns the compute thread. Only this thread touches the model and, through it, the KV tensor."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    async def call(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns on the compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def step(self, runner: ModelRunner, chunks: Sequence[Chunk], block_size: int) -> list[int]:
        """Compute ``chunks`` and return one token id for each chunk that samples, in their order.

        What the step reads of the sequences is copied first, so they may change while it runs; their blocks may not
        be given to anyone else until it has ended.
        """
        rows = [_row(chunk) for chunk in chunks]
        samples = [_sample_row(chunk) for chunk in chunks if chunk.samples]

        def compute() -> list[int]:
            logits = runner.forward(build_step(rows, block_size))  # [len(samples), vocab] float32
            return sample(logits, samples) if samples else []

        return await self.call(compute)

    def close(self) -> None:
        """Wait for the running step and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def _row(chunk: Chunk) -> Row:
    sequence, start = chunk.sequence, chunk.sequence.num_computed_tokens
    token_ids = sequence.token_ids[start : start + chunk.num_scheduled_tokens]
    return Row(token_ids, start, tuple(sequence.table.block_ids), chunk.samples)


def _sample_row(chunk: Chunk) -> SampleRow:
    sequence = chunk.sequence
    return SampleRow(sequence.sampling, sequence.sample_index, position=sequence.num_tokens)

"""Runs scheduled steps on the one compute thread, so that the event loop never waits for torch.

While a step runs it may write to the blocks of its sequences. A sequence that leaves meanwhile keeps its blocks until
the step has ended; then nobody else's bytes can be overwritten.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from functools import partial

from common.errors import InternalError
from kvstore.block_table import BlockTable
from kvstore.host.compute_thread import ComputeThread
from kvstore.host.flight import Flight, StepRunner
from kvstore.host.meter import StepMeter
from kvstore.host.reading import Computed, reading_of, readings_ahead
from kvstore.sequence import Chunk, Sequence

log = logging.getLogger(__name__)


class Stepper:
    """Launches one engine's steps, and gives blocks back when no step can write to them any more.

    A step that follows another may be launched before the results of that one are taken, but no third. Where the device
    works beside the compute thread, results are better read late: after the next launch. Used on the event loop.
    """

    def __init__(
        self,
        thread: ComputeThread,
        runner: StepRunner,
        block_size: int,
        meter: StepMeter,
        on_step: Callable[[float, int], None] = lambda elapsed_s, num_sequences: None,
        *,
        reads_late: bool = False,
    ) -> None:
        self.meter = meter
        self._flight = partial(Flight, runner, block_size, is_late=reads_late)
        self._on_step = on_step
        self._thread = thread
        self._flights: list[Flight] = []
        self._leaving: dict[Sequence, BlockTable] = {}

    async def run(self, chunks: Seq[Chunk]) -> list[Computed]:
        """Compute ``chunks`` while no other step runs; see :meth:`results`."""
        return await self.results(self.launch(chunks))

    def launch(self, chunks: Seq[Chunk], before: Callable[[], None] | None = None) -> Flight:
        """Let ``chunks`` be computed. ``before`` is called first, on the compute thread.

        What the step reads of the sequences is copied now, so they may change while it runs.
        """
        readings = [reading_of(chunk) for chunk in chunks]
        return self._launch(self._flight(readings, before, None))

    def launch_behind(self, flight: Flight, chunks: Seq[Chunk]) -> Flight:
        """Let ``chunks`` be computed, each the one token that ``flight`` is to sample of a sequence."""
        readings = readings_ahead(chunks, flight.readings)
        return self._launch(self._flight(readings, None, flight))

    async def results(self, flight: Flight) -> list[Computed]:
        """Return what became of the chunks of ``flight``, the oldest in the air.

        Raises InternalError, after logging the cause, when the model could not compute them.
        """
        self._thread.submit(flight.wait)
        try:
            return await asyncio.wrap_future(flight.results)
        except Exception as error:
            log.exception("a step failed")
            raise InternalError("the worker could not compute the sequence") from error
        finally:
            self._landed(flight)

    def leave_alone(self) -> None:
        """Nobody waits for what is in the air any more: give back what its sequences left."""
        self._flights = []
        self._release_landed()

    def release(self, table: BlockTable, sequence: Sequence) -> None:
        """Give back the blocks of a sequence that leaves, now or when the steps that compute it have ended."""
        self._leaving[sequence] = table
        self._release_landed()

    def leaving(self) -> Iterable[BlockTable]:
        """Return the tables that only steps in the air keep."""
        return self._leaving.values()

    def _launch(self, flight: Flight) -> Flight:
        self._flights.append(flight)
        if len(self._flights) == 1:
            self._begin(flight, time.monotonic())
        self._thread.submit(flight.launch)
        return flight

    def _begin(self, flight: Flight, now: float) -> None:
        flight.began = now
        self.meter.begin(now, sum(len(reading.row.token_ids) for reading in flight.readings))

    def _landed(self, flight: Flight) -> None:
        now = time.monotonic()
        sizes = [len(reading.row.token_ids) for reading in flight.readings]
        self._on_step(now - flight.began, len(sizes))
        self.meter.end(now, sum(size for size in sizes if size > 1), decodes=1 in sizes)
        self._flights.remove(flight)
        if self._flights:
            self._begin(self._flights[0], now)
        self._release_landed()

    def _release_landed(self) -> None:
        in_air = frozenset().union(*(flight.sequences for flight in self._flights))
        for sequence in [sequence for sequence in self._leaving if sequence not in in_air]:
            self._leaving.pop(sequence).release()

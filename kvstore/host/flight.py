"""One step between its launch and its results.

A step may be launched behind another whose tokens are not known yet: they are its input, and go there on the device.

    on a CPU    compute N | results of N | compute N+1 | …
    on a GPU    launch N | launch N+1, while N runs | results of N, while N+1 runs | launch sampling of N+1 | …

So the tokens of N are always known when N+1 samples: a history or a grammar has seen them by then.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future

import torch

from common.errors import InternalError
from common.model.batch import build_step
from common.model.runner import ModelRunner
from common.model.sampled_ids import SampledIds
from common.model.upload import upload
from kvstore.host.logits_read import LogitsRead
from kvstore.host.reading import Computed, Reading
from kvstore.sequence import Chunk, Sequence


class Flight:
    """Made on the event loop; its methods are called on the compute thread, in the order of the launches.

    ``readings`` are computed after ``before``, if given, and behind the step ``previous``, if given. Results that are
    ``is_late`` are not waited for at the launch.
    """

    def __init__(
        self,
        runner: ModelRunner,
        block_size: int,
        readings: Seq[Reading],
        before: Callable[[], None] | None = None,
        previous: "Flight | None" = None,
        *,
        is_late: bool = False,
    ) -> None:
        self.readings = readings
        self.chunks: tuple[Chunk, ...] = tuple(reading.chunk for reading in readings)
        self.sequences: frozenset[Sequence] = frozenset(chunk.sequence for chunk in self.chunks)
        self.results: Future[list[Computed]] = Future()
        self.results.set_running_or_notify_cancel()  # who stops waiting for it does not stop it
        self.began = 0.0
        """When it was launched, or the step before it ended if that was later; monotonic seconds."""
        self._runner = runner
        self._block_size = block_size
        self._before = before
        self._previous = previous
        self._is_late = is_late
        self._read: LogitsRead | None = None

    def launch(self) -> None:
        """Compute the step, or on a GPU let it be computed."""
        try:
            self._read = self._launched()
        except Exception as error:
            self.results.set_exception(error)
            raise
        finally:
            self._before = self._previous = None
        if not self._is_late:
            self.wait()

    def wait(self) -> None:
        """Wait for the results."""
        if self._read is None or self.results.done():
            return
        try:
            self.results.set_result(self._read.computed())
        except Exception as error:
            self.results.set_exception(error)
            raise

    def _launched(self) -> LogitsRead:
        if self._before is not None:
            self._before()
        step = build_step([reading.row for reading in self.readings], self._block_size)
        if self._previous is None:
            return LogitsRead(self._runner.forward(step), self.readings)
        sampled = self._previous._sampled()
        follows = torch.tensor([reading.follows for reading in self.readings])
        logits = self._runner.forward(step, sampled.input_ids(upload(follows, self._runner.device)))
        self._previous.wait()
        token_ids = sampled.tolist()
        for reading in self.readings:
            reading.follow(token_ids[reading.follows])
        return LogitsRead(logits, self.readings)

    def _sampled(self) -> SampledIds:
        if self._read is None:
            raise InternalError("the step before could not be computed")
        return self._read.sampled

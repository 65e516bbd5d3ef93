"""All the answers of one HTTP request: one flow a prompt, its samples in it, their pieces in the order they came in.

Its reader takes what has come since the last time, so a slow client gets fewer, larger reads. One flow that fails ends
them all. Closing it tells the decode workers and gives the places back, at once and without waiting.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from common.errors import BatonError, DeadlineExceeded, InternalError
from common.logprobs import TokenLogprobs
from common.sampling import SamplingParams
from gateway.admission import Ticket
from gateway.capacity import Backlog
from gateway.request.flow import Flow, FlowServices
from gateway.request.route import Route
from gateway.request.sample import Sample
from gateway.text.text_stream import NoText, Piece, TextStream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt and how its answers are sampled."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_samples: int = 1

    @property
    def num_sequences(self) -> int:
        """Sequences that run for it: its samples, or the beams that they are looked for with."""
        return self.num_samples if self.sampling.beam is None else self.sampling.beam.width


@dataclass(frozen=True, slots=True)
class IndexedPiece:
    """A piece of one of the answers."""

    index: int
    """All samples of a prompt before those of the next one."""
    piece: Piece
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """Of the prompt's tokens from the second on, if they were asked for."""


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Tokens of a request so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Running:
    """The generations that run now."""

    def __init__(self) -> None:
        self._generations: set[Generation] = set()

    def add(self, generation: "Generation") -> None:
        """Note one that begins."""
        self._generations.add(generation)

    def discard(self, generation: "Generation") -> None:
        """Forget one that has ended."""
        self._generations.discard(generation)

    def end_all(self, error: BatonError) -> None:
        """Let each of them fail with ``error``."""
        for generation in list(self._generations):
            generation.fail(error)


class Generation:
    """Owns the flows of one request and their tasks, from :meth:`start` to :meth:`close`."""

    def __init__(
        self,
        services: FlowServices,
        jobs: Sequence[Job],
        make_text: Callable[[Job], TextStream | NoText],
        ticket: Ticket,
        backlog: Backlog,
        running: Running,
        *,
        arrived_at: float,
        timeout_s: float,
        cache_salt: str = "",
    ) -> None:
        self.error: BatonError | None = None
        """Why the request failed, if it did; what came before it may have been taken."""
        self.prompts = [job.prompt for job in jobs]
        self._metrics = services.metrics
        self._ticket = ticket
        self._backlog = backlog
        self._places = [backlog.enter(len(job.prompt), job.sampling.max_tokens, job.num_sequences) for job in jobs]
        self._all_running = running
        self._timeout_s = timeout_s
        self._deadline = arrived_at + timeout_s
        self._pieces: list[IndexedPiece] = []
        self._wake = asyncio.Event()
        self._is_interrupted = False
        self._num_running = len(jobs)
        self._tasks: list[asyncio.Task[None]] = []
        self._flows = [
            Flow(
                services,
                job.prompt,
                job.sampling,
                [Sample(n, make_text(job), job.sampling.max_tokens) for n in range(job.num_samples)],
                arrived_at=arrived_at,
                deadline=self._deadline,
                cache_salt=cache_salt,
                emit=lambda sample, piece, number=number: self._emit(number, sample, piece),  # type: ignore[misc]
            )
            for number, job in enumerate(jobs)
        ]
        self._firsts = list(accumulate((job.num_samples for job in jobs), initial=0))

    def start(self) -> None:
        """Let the flows run."""
        self._all_running.add(self)
        self._tasks = [asyncio.create_task(self._run(flow)) for flow in self._flows]

    @property
    def has_ended(self) -> bool:
        """Whether no further piece will come and all were taken."""
        return self._num_running == 0 and not self._pieces

    @property
    def num_answers(self) -> int:
        """Samples of all prompts."""
        return self._firsts[-1]

    @property
    def route(self) -> Route | None:
        """How the first prompt is routed, once that is decided."""
        return self._flows[0].route

    def usage(self) -> UsageCounts:
        """Return the tokens so far."""
        return UsageCounts(
            sum(map(len, self.prompts)),
            sum(flow.num_output_tokens for flow in self._flows),
            sum(flow.cached_tokens for flow in self._flows),
        )

    async def take(self) -> list[IndexedPiece]:
        """Wait for pieces and return them; an empty list means the end, or that :meth:`interrupt` was called."""
        while not self._pieces and not self.has_ended and not self._is_interrupted:
            self._wake.clear()
            await self._wake.wait()
        self._is_interrupted = False
        pieces, self._pieces = self._pieces, []
        return pieces

    def interrupt(self) -> None:
        """Let :meth:`take` return, even with nothing."""
        self._is_interrupted = True
        self._wake.set()

    def close(self, reason: str) -> None:
        """End what still runs: tell the decode workers, and give the places back. Never waits; may be called again."""
        for flow, task in zip(self._flows, self._tasks, strict=False):
            flow.abort(reason)
            task.cancel()
        for place in self._places:
            self._backlog.leave(place)
        self._ticket.release()
        self._all_running.discard(self)

    def _emit(self, number: int, sample: int, piece: Piece) -> None:
        self._backlog.read(self._places[number])
        flow = self._flows[number]
        if piece.finish is not None:
            self._backlog.answered(flow.samples[sample].num_output_tokens)
        self._pieces.append(IndexedPiece(self._firsts[number] + sample, piece, flow.prompt_logprobs))
        self._wake.set()

    async def _run(self, flow: Flow) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await flow.run()
        except TimeoutError:
            self.fail(DeadlineExceeded(f"the request took longer than {self._timeout_s:g} s"))
        except BatonError as error:
            self.fail(error)
        except Exception:
            log.exception("fault while serving a request")
            self.fail(InternalError("internal error"))
        finally:
            self._num_running -= 1
            self._wake.set()

    def fail(self, error: BatonError) -> None:
        """End all flows; the first error is the one that counts."""
        if self.error is not None:
            return
        self.error = error
        self._metrics.failed.labels(error.type).inc()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()

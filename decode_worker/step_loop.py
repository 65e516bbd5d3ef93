"""The step loop: schedule, do what the decision says, compute, and let the answers take what came of it.

With asynchronous scheduling the step behind the running one is launched already, where it is sure; see
:mod:`decode_worker.look_ahead`. Then what is done here of a step is done while the next one runs.

Everything but the steps themselves runs on the event loop.
"""

import asyncio
import logging
import time
from collections.abc import Iterable

from common.errors import InternalError
from common.messages import Preempted, Role
from decode_worker.answers import Answers
from decode_worker.pulls import Pulls
from decode_worker.roster import Roster
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sharing import SharingMeter
from decode_worker.slots import Slot, Stage
from decode_worker.step import DecodeStep
from decode_worker.swap import SwapSpace
from kvstore.host.flight import Flight
from kvstore.host.hit_counter import HitCounter
from kvstore.host.parts import Parts
from kvstore.host.reading import Computed
from kvstore.host.stepper import Stepper
from kvstore.sequence import Chunk, Sequence

log = logging.getLogger(__name__)


class StepLoop:
    """Sleeps while there is nothing to do, until ``wake`` is set."""

    def __init__(
        self,
        parts: Parts,
        scheduler: DecodeScheduler,
        stepper: Stepper,
        swap: SwapSpace,
        roster: Roster,
        pulls: Pulls,
        answers: Answers,
        wake: asyncio.Event,
    ) -> None:
        self._is_async = parts.config.is_async_on(parts.model.spec.device.type)
        self._storage = parts.model.storage
        self._compute = parts.compute
        self._scheduler = scheduler
        self._stepper = stepper
        self._swap = swap
        self._roster = roster
        self._pulls = pulls
        self._answers = answers
        self._wake = wake
        self._hits = HitCounter(Role.DECODE)
        self._sharing = SharingMeter()
        self._num_prompt_tokens = 0
        self._num_ahead = 0

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return (
            self._hits.counters()
            | self._sharing.counters()
            | {"prompt_tokens_computed": self._num_prompt_tokens, "steps": self._stepper.meter.num_steps}
            | {"steps_launched_ahead": self._num_ahead}
        )

    async def run(self) -> None:
        """Step until cancelled."""
        try:
            await self._loop()
        finally:
            self._stepper.leave_alone()

    async def _loop(self) -> None:
        while True:
            step = self._scheduler.schedule(time.monotonic())
            self._apply(step)
            if step.saving is not None:
                await self._save(step.saving.sequence)
                continue
            if step.chunks:
                await self._run_steps(step)
                continue
            self._stepper.meter.idle()
            self._wake.clear()
            await self._wake.wait()

    def _apply(self, step: DecodeStep) -> None:
        for copy in step.copies:  # before anything else can happen to their blocks
            self._storage.copy(copy.src, copy.dst)
        for slot in step.started:
            self._started(slot)
        for slot in step.pulls:
            self._pulls.begin(self._roster.owner(slot.sequence), slot.sequence.num_computed_tokens)
        for slot in step.preempted:
            self._preempted(slot)

    def _started(self, slot: Slot) -> None:
        """Tell the gateway, once, that the prompt is computed here, and count what the cache held of it."""
        request, cached_tokens = self._roster.owner(slot.sequence), slot.sequence.num_computed_tokens
        if not request.started and not request.is_replay:
            self._hits.count(
                request.sequence.num_tokens,
                cached_tokens,
                fetched_tokens=request.fetched_tokens,
                peer=request.plan.peer if request.plan else None,
                tokens_per_s=self._stepper.meter.prompt_tokens_per_s,
            )
        request.report_started(cached_tokens)

    def _preempted(self, slot: Slot) -> None:
        """Let the gateway of one that is to be computed again find out whether a prefill worker would be sooner."""
        sequence, request = slot.sequence, self._roster.owner(slot.sequence)
        log.info("%s: preempted", request.request_id)
        may_move = request.sequence is sequence and not sequence.num_forks and not request.has_forked
        if slot.stage is Stage.WAITING and may_move:
            request.is_replay, request.started = True, False
            cached_tokens = sequence.table.cached_prefix(sequence.token_ids)
            request.outbox.put(Preempted(request.request_id, cached_tokens))

    async def _save(self, sequence: Sequence) -> None:
        """Copy the blocks of a preempted sequence to host memory, then give them back."""
        await self._compute.call(self._swap.saving(sequence))
        if self._roster.find_owner(sequence) is not None:
            self._scheduler.saved(sequence)
        else:  # it ended meanwhile
            self._swap.drop(sequence)

    async def _run_steps(self, step: DecodeStep) -> None:
        """Run ``step`` and those that can be launched behind it, each while the one before still runs."""
        before = self._swap.restoring(step.restored) if step.restored else None
        flight: Flight | None = self._stepper.launch(step.chunks, before)
        while flight is not None:
            behind = self._launch_behind(flight)
            await self._land(flight)
            flight = behind

    def _launch_behind(self, flight: Flight) -> Flight | None:
        if not self._is_async:
            return None
        chunks = self._scheduler.schedule_behind(flight.chunks, time.monotonic())
        if not chunks:
            return None
        self._num_ahead += 1
        return self._stepper.launch_behind(flight, chunks)

    async def _land(self, flight: Flight) -> None:
        """Wait for the results of a step, and let the answers take them."""
        self._observe_sharing(flight.chunks)
        try:
            results = await self._stepper.results(flight)
        except InternalError as error:
            for chunk in flight.chunks:
                self._answers.fail(chunk.sequence, error)
            return
        for result in results:
            self._computed(result)

    def _observe_sharing(self, chunks: Iterable[Chunk]) -> None:
        for request in {self._roster.find_owner(chunk.sequence) for chunk in chunks}:
            if request is not None and request.has_forked:
                self._sharing.observe([sequence.table for sequence in self._roster.sequences_of(request)])

    def _computed(self, result: Computed) -> None:
        chunk, sequence = result.chunk, result.chunk.sequence
        self._num_prompt_tokens += chunk.num_prompt_tokens
        request = self._roster.find_owner(sequence)
        if request is None or request.gone:  # aborted while the step ran, or ended with the one before
            return
        sequence.scored(sequence.num_computed_tokens, result.prompt_logprobs)
        self._scheduler.computed(chunk)
        if result.error is not None:
            self._answers.fail(sequence, result.error)
        else:
            self._answers.computed(request, sequence, result.tokens)

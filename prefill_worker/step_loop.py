"""The step loop: schedule, open leases for what was admitted, compute, and hand over what is complete."""

import asyncio

from common.errors import BatonError, InternalError
from kvstore.host.memory_ahead import MemoryAhead
from kvstore.host.reading import Computed
from kvstore.host.stepper import Stepper
from kvstore.sequence import Sequence
from prefill_worker.intake import Intake
from prefill_worker.leases import Leases
from prefill_worker.roster import Roster
from prefill_worker.scheduler import PrefillScheduler, PrefillStep


class StepLoop:
    """Sleeps while there is nothing to do, until ``wake`` is set."""

    def __init__(
        self,
        scheduler: PrefillScheduler,
        stepper: Stepper,
        intake: Intake,
        roster: Roster,
        leases: Leases,
        ahead: MemoryAhead,
        wake: asyncio.Event,
    ) -> None:
        self._scheduler = scheduler
        self._stepper = stepper
        self._intake = intake
        self._roster = roster
        self._leases = leases
        self._ahead = ahead
        self._wake = wake
        self._num_prompt_tokens = 0
        self._num_handovers = 0

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return {
            "prompt_tokens_computed": self._num_prompt_tokens,
            "handovers": self._num_handovers,
            "steps": self._stepper.meter.num_steps,
        }

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            step = self._scheduler.schedule()
            for sequence in step.admitted:
                self._leases.begin(self._roster.owner(sequence))
            if step.chunks:
                await self._run_step(step)
                continue
            self._stepper.meter.idle()
            self._wake.clear()
            await self._ahead.take(self._wake)
            await self._wake.wait()

    async def _run_step(self, step: PrefillStep) -> None:
        try:
            results = await self._stepper.run(step.chunks)
        except InternalError as error:
            for chunk in step.chunks:
                self._fail(chunk.sequence, error)
            return
        for result in results:
            self._computed(result)

    def _computed(self, result: Computed) -> None:
        chunk, sequence = result.chunk, result.chunk.sequence
        self._num_prompt_tokens += chunk.num_scheduled_tokens  # a moved sequence's output too
        job = self._roster.find_owner(sequence)
        if job is None:  # released while the step ran
            return
        assert job.outgoing is not None
        sequence.scored(sequence.num_computed_tokens, result.prompt_logprobs)
        self._scheduler.computed(chunk)
        job.outgoing.advance(sequence.num_computed_tokens)
        if result.error is not None:
            self._fail(sequence, result.error)
        elif sequence.num_remaining_tokens == 0:
            self._num_handovers += 1
            job.outgoing.hand_over(job.handover(result.tokens))
            self._intake.finished(job.entry_id)

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        job = self._roster.find_owner(sequence)
        if job is not None and job.outgoing is not None:
            self._scheduler.remove(sequence)
            job.outgoing.fail(error)

"""Who is here: the jobs of a prefill worker, from their queue entries until their blocks are given back."""

import asyncio

from common.ids import TransferId
from kvstore.block_table import BlockTable
from kvstore.host.stepper import Stepper
from kvstore.sequence import Sequence
from prefill_worker.intake import Intake
from prefill_worker.job import Job
from prefill_worker.scheduler import PrefillScheduler


class Roster:
    """Owns the jobs. ``wake`` is set when blocks go back."""

    def __init__(self, scheduler: PrefillScheduler, stepper: Stepper, intake: Intake, wake: asyncio.Event) -> None:
        self._scheduler = scheduler
        self._stepper = stepper
        self._intake = intake
        self._wake = wake
        self._jobs: dict[TransferId, Job] = {}
        self._by_sequence: dict[Sequence, Job] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def jobs(self) -> list[Job]:
        """Return every job."""
        return list(self._jobs.values())

    def get(self, transfer_id: TransferId) -> Job | None:
        """Return the job of a transfer if it is here."""
        return self._jobs.get(transfer_id)

    def owner(self, sequence: Sequence) -> Job:
        """Return the job of ``sequence``, which must be here."""
        return self._by_sequence[sequence]

    def find_owner(self, sequence: Sequence) -> Job | None:
        """Return the job of ``sequence`` if that is here."""
        return self._by_sequence.get(sequence)

    def has(self, job: Job) -> bool:
        """Say whether the job is still here."""
        return job.sequence in self._by_sequence

    def tables(self) -> list[BlockTable]:
        """Return every table that holds blocks."""
        return [*(job.sequence.table for job in self._jobs.values()), *self._stepper.leaving()]

    async def wait_empty(self) -> None:
        """Return when nothing is here."""
        await self._empty.wait()

    def add(self, job: Job) -> None:
        """Take a new job. It is not scheduled yet."""
        self._jobs[job.transfer_id] = job
        self._by_sequence[job.sequence] = job
        self._empty.clear()

    def forget(self, job: Job) -> None:
        """Let a job go: give its blocks back, when no step writes to them, and acknowledge its entry."""
        del self._jobs[job.transfer_id]
        del self._by_sequence[job.sequence]
        self._scheduler.remove(job.sequence)
        self._intake.finished(job.entry_id)
        self._stepper.release(job.sequence.table, job.sequence)
        if not self._jobs:
            self._empty.set()
        self._intake.made_room()
        self._wake.set()

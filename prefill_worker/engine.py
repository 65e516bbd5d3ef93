"""The prefill role: takes prompts off its queue, computes them in chunks, and lets decode workers pull the blocks.

Life of a prompt: queued -> prepared (its grammar compiled; fetched in part from a peer that holds its prefix, if that
is cheaper) -> admitted (has its blocks; a lease is open and offered to the decode worker) -> computed (the next token
is sampled and handed over) -> released, by the decode worker's Done, a Cancel, or the lease's end. Released may come at
any moment; blocks of a prompt that a running step still writes to are given back when the step has ended.

    queue            intake (reads) -> arrivals (until it is scheduled)
    step loop        scheduler decides -> leases open, a step is computed -> handed over
    decode workers   pull and release by way of the host's transfer server
    all of them      roster (who is here), a job each
"""

import asyncio
import logging
from collections.abc import Iterable

from common.ids import TransferId
from common.messages import QUEUE_RESETS, SequenceReport, SlotCounts, WorkerLoad
from common.rpc import Handlers
from kvstore.block_table import BlockTable
from kvstore.host.memory_ahead import MemoryAhead
from kvstore.host.parts import Parts
from kvstore.outgoing import ReleaseReason
from prefill_worker.arrivals import Arrivals
from prefill_worker.intake import Intake
from prefill_worker.leases import Leases
from prefill_worker.roster import Roster
from prefill_worker.scheduler import PrefillScheduler
from prefill_worker.step_loop import StepLoop

log = logging.getLogger(__name__)


class PrefillEngine:
    """Puts the parts of the role together, and is what the host asks. Runs on the event loop."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        wake = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._scheduler = PrefillScheduler(
            parts.model.pool, token_budget=config.token_budget, max_num_seqs=config.max_num_seqs
        )
        stepper = parts.new_stepper()
        self._meter = stepper.meter
        self._intake = Intake(parts.redis, parts.worker_id, parts.epoch)
        self._roster = Roster(self._scheduler, stepper, self._intake, wake)
        self._leases = Leases(parts, self._meter, self._group)
        self._arrivals = Arrivals(
            parts, self._meter, self._scheduler, self._intake, self._roster, self._leases, self._group, wake
        )
        ahead = MemoryAhead(parts.model.pool, parts.model.storage, parts.compute)
        self._loop = StepLoop(self._scheduler, stepper, self._intake, self._roster, self._leases, ahead, wake)

    def handlers(self) -> Handlers:
        """A prefill worker serves nothing beyond its blocks."""
        return Handlers({}, {}, {})

    async def run(self) -> None:
        """Work until cancelled."""
        async with self._group as group:
            group.create_task(self._arrivals.run())
            await self._loop.run()

    async def drain(self) -> None:
        """Take nothing new; return when every lease has ended."""
        self._intake.close()
        await self._roster.wait_empty()

    async def hand_back(self) -> None:
        """End every lease: who waits for its blocks computes what is missing."""
        for job in self._roster.jobs():
            if job.outgoing is None:
                self._roster.forget(job)
            else:
                self._leases.close(job)
        await self._roster.wait_empty()

    def released(self, transfer_id: TransferId, reason: ReleaseReason) -> None:
        """A lease has ended, for whatever reason."""
        job = self._roster.get(transfer_id)
        if job is not None:
            log.debug("%s: released, %s", job.task.request_id, reason)
            self._roster.forget(job)

    def load(self, now: float) -> WorkerLoad:
        """Return the load at ``now``."""
        return WorkerLoad(
            running=self._scheduler.num_running,
            waiting=self._arrivals.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            tokens_per_s=self._meter.prompt_tokens_per_s,
            tick_age_s=self._meter.tick_age_s(now),
            busy=self._meter.busy(now),
        )

    def slots(self) -> SlotCounts:
        """Return the slots of all jobs' blocks, and how many of them hold a token or will when it is computed."""
        sequences = [job.sequence for job in self._roster.jobs() if job.sequence.table.block_ids]
        allocated = sum(sequence.table.num_slots for sequence in sequences)
        return SlotCounts(allocated, sum(sequence.num_tokens for sequence in sequences))

    def tables(self) -> Iterable[BlockTable]:
        """Return every table that holds blocks."""
        return self._roster.tables()

    def sequences(self) -> Iterable[SequenceReport]:
        """Return every prompt: ``waiting`` for blocks, ``running``, or ``lent`` until its blocks were pulled."""
        return [job.report() for job in self._roster.jobs()]

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return self._leases.counters() | self._loop.counters() | {QUEUE_RESETS: self._intake.num_resets}


def create(parts: Parts) -> PrefillEngine:
    """Return the engine of the prefill role."""
    return PrefillEngine(parts)

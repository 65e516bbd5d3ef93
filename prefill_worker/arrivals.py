"""From a queue entry to a scheduled prompt: its grammar is compiled, and the prefix that a peer holds is fetched, where
that is cheaper than computing it."""

import asyncio
import time

from common.errors import InvalidRequest
from common.messages import PeerPrefix, Prefill
from kvstore.host.meter import StepMeter
from kvstore.host.parts import Parts
from kvstore.sequence import Sequence
from prefill_worker.intake import Intake
from prefill_worker.job import Job
from prefill_worker.leases import Leases
from prefill_worker.roster import Roster
from prefill_worker.scheduler import PrefillScheduler

EXPIRE_S = 1.0
"""How often it is looked for prompts whose time ran out."""


class Arrivals:
    """Prompts before they have blocks. ``wake`` is set when one is ready to be scheduled."""

    def __init__(
        self,
        parts: Parts,
        meter: StepMeter,
        scheduler: PrefillScheduler,
        intake: Intake,
        roster: Roster,
        leases: Leases,
        group: asyncio.TaskGroup,
        wake: asyncio.Event,
    ) -> None:
        self._parts = parts
        self._meter = meter
        self._scheduler = scheduler
        self._intake = intake
        self._roster = roster
        self._leases = leases
        self._group = group
        self._wake = wake
        self._num_preparing = 0

    @property
    def num_waiting(self) -> int:
        """Prompts that have no blocks yet."""
        return self._scheduler.num_waiting + self._num_preparing

    async def run(self) -> None:
        """Read the queue, and drop what has waited too long, until cancelled; then remove the queue."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._intake.run(self._accept, self._room))
                group.create_task(self._expire())
        finally:
            await self._intake.delete()

    def _room(self) -> int:
        return self._parts.config.max_waiting - self.num_waiting

    def _accept(self, entry_id: bytes, task: Prefill) -> None:
        if self._roster.get(task.transfer_id) is not None:
            self._intake.finished(entry_id)
            return
        sequence = Sequence(
            task.request_id,
            list(task.token_ids),
            task.num_prompt_tokens,
            task.sampling,
            self._parts.new_table(task.cache_salt),
            task.sample_indices,
        )
        job = Job(task, entry_id, sequence, time.monotonic() + task.remaining_s)
        self._roster.add(job)
        limit = self._parts.model.spec.max_model_len
        if sequence.num_tokens > limit:
            error = InvalidRequest(f"prompt of {sequence.num_tokens} tokens is over the limit of {limit}")
            self._leases.refuse(job, error)
        elif task.sampling.constraint is None and _peer(job) is None:
            self._schedule(job)
        else:
            self._num_preparing += 1
            self._group.create_task(self._prepare(job))

    def _schedule(self, job: Job) -> None:
        self._scheduler.add(job.sequence)
        self._wake.set()

    async def _prepare(self, job: Job) -> None:
        constraint, peer = job.task.sampling.constraint, _peer(job)
        try:
            if constraint is not None:
                job.sequence.grammar = await self._parts.model.grammars.get(constraint)
            if peer is not None:
                await self._fetch(job, peer)
        except InvalidRequest as error:
            if self._roster.has(job):
                self._leases.refuse(job, error)
            return
        finally:
            self._num_preparing -= 1
        if self._roster.has(job):  # not dropped meanwhile
            self._schedule(job)

    async def _fetch(self, job: Job, peer: PeerPrefix) -> None:
        """Bring the prefix that ``peer`` holds into the cache, if that is cheaper than computing it."""
        task = job.task
        job.fetched_tokens = await self._parts.fetcher.fetch(
            task.token_ids, peer, lambda: self._parts.new_table(task.cache_salt), self._meter.prompt_tokens_per_s
        )

    async def _expire(self) -> None:
        """Drop prompts whose time ran out before they got blocks; their decode worker has given them up."""
        while True:
            await asyncio.sleep(EXPIRE_S)
            now = time.monotonic()
            for job in self._roster.jobs():
                if job.outgoing is None and job.expires_at < now:
                    self._roster.forget(job)


def _peer(job: Job) -> PeerPrefix | None:
    """Return who may lend the job's prefix; nobody, when all tokens must be computed for their log probabilities."""
    return None if job.sequence.wants_prompt_logprobs else job.task.peer

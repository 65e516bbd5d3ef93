"""The prefill role: takes prompts off its queue, computes them in chunks, and lets decode workers pull the blocks.

Life of a prompt: queued -> fetched in part, from a peer that holds its prefix, if that is cheaper -> admitted (has its
blocks; a lease is open and offered to the decode worker) -> computed (the next token is sampled and handed over) ->
released, by the decode worker's Done, a Cancel, or the lease's end. Released may come at any moment; blocks of a prompt
that a running step still writes to are given back when the step has ended.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from common.errors import BatonError, InternalError, InvalidRequest
from common.ids import TransferId
from common.messages import (
    QUEUE_RESETS,
    Handover,
    Offer,
    OfferReply,
    PeerPrefix,
    Prefill,
    Role,
    SampledToken,
    SequenceReport,
    SlotCounts,
    WorkerLoad,
)
from common.rpc import Handlers
from common.sampling import finish_reason
from common.services import OFFER
from kvstore.block_table import BlockTable
from kvstore.host.hit_counter import HitCounter
from kvstore.host.parts import Parts
from kvstore.host.reading import Computed
from kvstore.outgoing import Outgoing, ReleaseReason
from kvstore.sequence import Sequence
from prefill_worker.intake import Intake
from prefill_worker.scheduler import PrefillScheduler, PrefillStep

log = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 5.0
"""A decode worker that does not answer an offer for this long has lost it."""


@dataclass(slots=True, eq=False)
class _Job:
    """One prompt from its queue entry to its release."""

    task: Prefill
    entry_id: bytes
    sequence: Sequence
    expires_at: float
    outgoing: Outgoing | None = None
    cached_tokens: int = 0
    fetched_tokens: int = 0
    """Tokens of the prefix that were just pulled from a peer."""


class PrefillEngine:
    """Owns the jobs, their sequences and tables. Runs on the event loop; steps run on the compute thread."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self._parts = parts
        self._scheduler = PrefillScheduler(
            parts.model.pool, token_budget=config.token_budget, max_num_seqs=config.max_num_seqs
        )
        self._intake = Intake(parts.redis, parts.worker_id, parts.epoch, accept=self._accept, room=self._room)
        self._jobs: dict[TransferId, _Job] = {}
        self._by_sequence: dict[Sequence, _Job] = {}
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._stepper = parts.new_stepper()
        self._counters = dict.fromkeys(("prompt_tokens_computed", "handovers", "offers_refused"), 0)
        self._hits = HitCounter(Role.PREFILL)
        self._num_preparing = 0

    # ---- what the host asks ----

    def handlers(self) -> Handlers:
        """A prefill worker serves nothing beyond its blocks."""
        return Handlers({}, {}, {})

    async def run(self) -> None:
        """Work until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                group.create_task(self._intake.run())
                group.create_task(self._expire_waiting())
                await self._step_loop()
        finally:
            await self._intake.delete()

    async def drain(self) -> None:
        """Take nothing new; return when every lease has ended."""
        self._intake.close()
        await self._empty.wait()

    async def hand_back(self) -> None:
        """End every lease: who waits for its blocks computes what is missing."""
        for job in list(self._jobs.values()):
            if job.outgoing is None:
                self._forget(job)
            else:
                self._parts.transfers.close(job.task.transfer_id)
        await self._empty.wait()

    def load(self, now: float) -> WorkerLoad:
        """Return the load at ``now``."""
        return WorkerLoad(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting + self._num_preparing,
            queued_tokens=self._scheduler.num_queued_tokens,
            tokens_per_s=self._stepper.meter.prompt_tokens_per_s,
            tick_age_s=self._stepper.meter.tick_age_s(now),
            busy=self._stepper.meter.busy(now),
        )

    def slots(self) -> SlotCounts:
        """Return the slots of all jobs' blocks, and how many of them hold a token or will when it is computed."""
        sequences = [job.sequence for job in self._jobs.values() if job.sequence.table.block_ids]
        allocated = sum(len(sequence.table.block_ids) for sequence in sequences) * self._parts.config.block_size
        return SlotCounts(allocated, sum(sequence.num_tokens for sequence in sequences))

    def tables(self) -> Iterable[BlockTable]:
        """Return every table that holds blocks."""
        return [*(job.sequence.table for job in self._jobs.values()), *self._stepper.leaving()]

    def sequences(self) -> Iterable[SequenceReport]:
        """Return every prompt: ``waiting`` for blocks, ``running``, or ``lent`` until its blocks were pulled."""
        return [
            SequenceReport(
                job.task.request_id,
                _stage(job),
                job.sequence.num_tokens,
                job.sequence.num_computed_tokens,
                len(job.sequence.table.block_ids),
            )
            for job in self._jobs.values()
        ]

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return (
            self._counters
            | self._hits.counters()
            | {"steps": self._stepper.meter.num_steps, QUEUE_RESETS: self._intake.num_resets}
        )

    # ---- coming in ----

    def _room(self) -> int:
        return self._parts.config.max_waiting - self._scheduler.num_waiting - self._num_preparing

    def _accept(self, entry_id: bytes, task: Prefill) -> None:
        if task.transfer_id in self._jobs:
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
        job = _Job(task, entry_id, sequence, time.monotonic() + task.remaining_s)
        self._jobs[task.transfer_id] = job
        self._by_sequence[sequence] = job
        self._empty.clear()
        limit = self._parts.model.spec.max_model_len
        if sequence.num_tokens > limit:
            self._refuse(job, InvalidRequest(f"prompt of {sequence.num_tokens} tokens is over the limit of {limit}"))
            return
        if (task.peer is None or sequence.wants_prompt_logprobs) and task.sampling.constraint is None:
            self._add(job)
        else:
            self._num_preparing += 1
            self._group.create_task(self._prepare(job))

    def _add(self, job: _Job) -> None:
        self._scheduler.add(job.sequence)
        self._wake.set()

    async def _prepare(self, job: _Job) -> None:
        """Compile the grammar and fetch the prefix that a peer holds, then queue the prompt."""
        constraint, peer = job.task.sampling.constraint, job.task.peer
        try:
            if constraint is not None:
                job.sequence.grammar = await self._parts.model.grammars.get(constraint)
            if peer is not None and not job.sequence.wants_prompt_logprobs:
                await self._fetch(job, peer)
        except InvalidRequest as error:
            self._refuse(job, error)
            return
        finally:
            self._num_preparing -= 1
        if job.sequence in self._by_sequence:  # not dropped meanwhile
            self._add(job)

    async def _fetch(self, job: _Job, peer: PeerPrefix) -> None:
        """Bring the prefix that ``peer`` holds into the cache, if that is cheaper than computing it."""
        task, rate = job.task, self._stepper.meter.prompt_tokens_per_s
        job.fetched_tokens = await self._parts.fetcher.fetch(
            task.token_ids, peer, lambda: self._parts.new_table(task.cache_salt), rate
        )

    def _refuse(self, job: _Job, error: InvalidRequest) -> None:
        """Offer a transfer that has failed, so that the decode worker hears why."""
        if job.sequence in self._by_sequence:
            job.outgoing = self._parts.transfers.open(job.task.transfer_id, ())
            job.outgoing.fail(error)
            self._group.create_task(self._offer(job))

    async def _expire_waiting(self) -> None:
        """Drop prompts whose time ran out before they got blocks; their decode worker has given them up."""
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            for job in [job for job in self._jobs.values() if job.outgoing is None and job.expires_at < now]:
                self._forget(job)

    def _begin(self, sequence: Sequence) -> None:
        """The prompt has its blocks: open the lease and offer it."""
        job = self._by_sequence[sequence]
        job.cached_tokens = sequence.num_computed_tokens
        if not job.task.is_replay:
            self._hits.count(
                sequence.num_tokens,
                job.cached_tokens,
                fetched_tokens=job.fetched_tokens,
                peer=job.task.peer,
                tokens_per_s=self._stepper.meter.prompt_tokens_per_s,
            )
        job.outgoing = self._parts.transfers.open(job.task.transfer_id, tuple(sequence.table.block_ids))
        job.outgoing.advance(sequence.num_computed_tokens)
        self._group.create_task(self._offer(job))

    async def _offer(self, job: _Job) -> None:
        assert job.outgoing is not None
        task, parts = job.task, self._parts
        offer = Offer(
            transfer_id=task.transfer_id,
            worker_id=parts.worker_id,
            epoch=parts.epoch,
            address=parts.address,
            generation=job.outgoing.generation,
            cached_tokens=job.cached_tokens,
            decode_epoch=task.decode_epoch,
        )
        try:
            with parts.peers.use(task.decode_address) as client:
                reply: OfferReply = await client.call(OFFER, offer, OFFER_TIMEOUT_S)
        except BatonError as error:
            reply = OfferReply(False, error.message)
        if not reply.accepted:
            self._counters["offers_refused"] += 1
            log.info("%s: offer refused: %s", task.request_id, reply.reason)
            parts.transfers.close(task.transfer_id)

    # ---- steps ----

    async def _step_loop(self) -> None:
        while True:
            step = self._scheduler.schedule()
            for sequence in step.admitted:
                self._begin(sequence)
            if step.chunks:
                await self._run(step)
                continue
            self._stepper.meter.idle()
            self._wake.clear()
            await self._wake.wait()

    async def _run(self, step: PrefillStep) -> None:
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
        self._counters["prompt_tokens_computed"] += chunk.num_scheduled_tokens  # a moved sequence's output too
        job = self._by_sequence.get(sequence)
        if job is None:  # released while the step ran
            return
        assert job.outgoing is not None
        sequence.scored(sequence.num_computed_tokens, result.prompt_logprobs)
        self._scheduler.computed(chunk)
        job.outgoing.advance(sequence.num_computed_tokens)
        if result.error is not None:
            self._fail(sequence, result.error)
        elif sequence.num_remaining_tokens == 0:
            self._counters["handovers"] += 1
            job.outgoing.hand_over(_handover(job, result.tokens))
            self._intake.finished(job.entry_id)

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        job = self._by_sequence.get(sequence)
        if job is not None and job.outgoing is not None:
            self._scheduler.remove(sequence)
            job.outgoing.fail(error)

    # ---- going out ----

    def released(self, transfer_id: TransferId, reason: ReleaseReason) -> None:
        """A lease has ended, for whatever reason."""
        job = self._jobs.get(transfer_id)
        if job is not None:
            log.debug("%s: released, %s", job.task.request_id, reason)
            self._forget(job)

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.task.transfer_id]
        del self._by_sequence[job.sequence]
        self._scheduler.remove(job.sequence)
        self._intake.finished(job.entry_id)
        self._stepper.release(job.sequence.table, job.sequence)
        if not self._jobs:
            self._empty.set()
        self._intake.made_room()
        self._wake.set()


def _handover(job: _Job, tokens: tuple[SampledToken, ...]) -> Handover:
    sequence, num_output_tokens = job.sequence, job.sequence.num_output_tokens + 1
    ends = [
        finish_reason(token.token_id, num_output_tokens, sequence.sampling, is_complete=token.is_complete) is not None
        for token in tokens
    ]
    return Handover(
        job.task.transfer_id,
        sequence.num_tokens,
        tokens,
        job.cached_tokens,
        has_kv=sequence.sampling.beam is not None or not (ends and all(ends)),
        prompt_logprobs=None if sequence.sampling.prompt_logprobs is None else tuple(sequence.prompt_logprobs),
    )


def _stage(job: _Job) -> str:
    if job.outgoing is None:
        return "waiting"
    return "running" if job.outgoing.handover is None else "lent"


def create(parts: Parts) -> PrefillEngine:
    """Return the engine of the prefill role."""
    return PrefillEngine(parts)

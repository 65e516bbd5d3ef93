"""The decode role: owns sequences, pulls or computes their prompts, and writes their answers.

Life of a sequence: accepted (its gateway has Accepted) -> planned, local or remote -> has its blocks, from its own
prefix cache, by pulling and by computing -> one token a step -> finished, aborted or failed. Of several samples of a
prompt, the prompt goes this way as a sequence of its own; when it is computed the samples fork from it, and it ends.
Everything but the steps runs on the event loop. Blocks that a running step or a pull may still write to are given back
when that has ended.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from collections.abc import Sequence as Seq

from common.constraint import Constraint
from common.errors import BatonError, InternalError, InvalidRequest, Overloaded, Unavailable, to_detail
from common.grammar import Grammar
from common.ids import BlockId, RequestId, TransferId
from common.messages import (
    Abort,
    Accepted,
    Handover,
    Offer,
    OfferReply,
    PeerPrefix,
    Plan,
    PlanKind,
    Preempted,
    Refused,
    Role,
    SampledToken,
    SequenceReport,
    SessionDown,
    SessionUp,
    SlotCounts,
    Started,
    Submit,
    WorkerLoad,
)
from common.rpc import Handlers
from common.sampling import SamplingParams
from common.services import OFFER, SESSION
from common.sizes import parse_size
from decode_worker.forks import Forks
from decode_worker.outbox import Outbox
from decode_worker.request import ExpectedTransfers, Request
from decode_worker.scheduler import DecodeScheduler, DecodeStep, Slot, Stage
from decode_worker.sharing import SharingMeter
from decode_worker.swap import SwapSpace
from kvstore.block_table import BlockTable
from kvstore.host.hit_counter import HitCounter
from kvstore.host.parts import Parts
from kvstore.host.reading import Computed
from kvstore.outgoing import ReleaseReason
from kvstore.sequence import Sequence
from kvstore.transfer_client import PullOutcome

log = logging.getLogger(__name__)

RETRY_AFTER_S = 1.0
"""What a refused gateway is told to wait."""


class DecodeEngine:
    """Owns the requests, their sequences and tables. Runs on the event loop; steps run on the compute thread."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config
        self._parts = parts
        self._stepper = parts.new_stepper()
        self._swap = SwapSpace(
            parts.model.storage,
            config.preemption,
            parse_size(config.swap_memory, flag="--swap-memory"),
            lambda: self._stepper.meter.prompt_tokens_per_s,
        )
        self._scheduler = DecodeScheduler(
            parts.model.pool,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            local_chunk_tokens=config.local_chunk_tokens,
            ageing_s=config.priority_ageing_s,
            saves=self._swap.is_preferred,
        )
        self._forks = Forks(self._scheduler, parts.new_table, self._adopt, self._drop)
        self._hits = HitCounter(Role.DECODE)
        self._requests: dict[RequestId, Request] = {}
        self._compiling: dict[RequestId, asyncio.Task[None]] = {}
        self._by_sequence: dict[Sequence, Request] = {}
        self._expected = ExpectedTransfers()
        self._sharing = SharingMeter()
        self._sessions: set[Outbox] = set()
        self._draining = False
        self._over = False
        self._all_released = asyncio.Event()
        self._all_released.set()
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._counters = dict.fromkeys(
            (
                "generation_tokens",
                "prompt_tokens_computed",
                "pulls",
                "pulls_failed",
                "pulled_tokens",
                "stale_offers",
                "refused",
            ),
            0,
        )

    # ---- what the host asks ----

    def handlers(self) -> Handlers:
        """Return what gateways and prefill workers call."""
        return Handlers(unary={OFFER: self._offered}, stream={}, bidi={SESSION: self._session})

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            await self._step_loop()

    async def drain(self) -> None:
        """Refuse new sequences; return when the last has ended."""
        self._draining = True
        await self._empty.wait()

    async def hand_back(self) -> None:
        """Give up every sequence, so that its gateway moves it, and end the sessions."""
        for request in list(self._requests.values()):
            self._give_up(request, Unavailable("the decode worker takes another role"))
        self._over = True
        for outbox in self._sessions:
            outbox.close()
        await self._all_released.wait()

    def released(self, transfer_id: TransferId, reason: ReleaseReason) -> None:
        """A decode worker hands nothing over; what it lends is the lender's."""

    def load(self, now: float) -> WorkerLoad:
        """Return the load at ``now``."""
        return WorkerLoad(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            tokens_per_s=self._stepper.meter.prompt_tokens_per_s,
            tick_age_s=self._stepper.meter.tick_age_s(now),
            busy=self._stepper.meter.busy(now),
            itl_s=self._stepper.meter.itl_s,
            admission_wait_s=self._admission_wait_s(now),
        )

    def _admission_wait_s(self, now: float) -> float:
        waiting = self._scheduler.first_without_room()
        since = None if waiting is None else self._by_sequence[waiting].ready_at
        return 0.0 if since is None else max(0.0, now - since)

    def slots(self) -> SlotCounts:
        """Return the slots of all sequences' blocks, and how many hold a token or will when it is computed."""
        sequences = [sequence for sequence in self._scheduler.sequences() if sequence.table.block_ids]
        allocated = sum(sequence.table.num_slots for sequence in sequences)
        return SlotCounts(allocated, sum(min(sequence.num_tokens, sequence.table.num_slots) for sequence in sequences))

    def tables(self) -> Iterable[BlockTable]:
        """Return every table that holds blocks."""
        return [*(sequence.table for sequence in self._by_sequence), *self._stepper.leaving()]

    def sequences(self) -> Iterable[SequenceReport]:
        """Return every sequence with its stage; one that only waits for a pull to end is ``leaving``."""
        return [
            SequenceReport(
                sequence.request_id,
                "leaving" if request.gone else self._scheduler.stage(sequence).name.lower(),
                sequence.num_tokens,
                sequence.num_computed_tokens,
                len(sequence.table.block_ids),
            )
            for sequence, request in self._by_sequence.items()
        ]

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return (
            self._counters
            | self._hits.counters()
            | self._sharing.counters()
            | self._swap.counters()
            | {
                "forks": self._forks.num_forks,
                "steps": self._stepper.meter.num_steps,
                "preemptions": self._scheduler.num_preemptions,
            }
        )

    # ---- gateways ----

    async def _session(self, messages: AsyncIterator[SessionUp]) -> AsyncGenerator[SessionDown, None]:
        """Serve one gateway until it goes; then whatever it had here is aborted."""
        outbox = Outbox()
        self._sessions.add(outbox)
        reader = asyncio.create_task(self._read(messages, outbox))
        try:
            async for message in outbox.messages():
                yield message
            if not self._over:
                await reader
        finally:
            reader.cancel()
            outbox.close()
            self._sessions.discard(outbox)
            for request in [request for request in self._requests.values() if request.outbox is outbox]:
                self._leave(request)

    async def _read(self, messages: AsyncIterator[SessionUp], outbox: Outbox) -> None:
        try:
            async for message in messages:
                match message:
                    case Submit(sampling=SamplingParams(constraint=Constraint() as constraint)):
                        self._compiling[message.request_id] = self._group.create_task(
                            self._submit_constrained(message, constraint, outbox)
                        )
                    case Submit():
                        self._submit(message, outbox)
                    case Plan():
                        self._planned(message)
                    case Abort():
                        self._aborted(message)
        finally:
            outbox.close()

    async def _submit_constrained(self, submit: Submit, constraint: Constraint, outbox: Outbox) -> None:
        """Take a sequence once its grammar is compiled, unless it is aborted until then."""
        try:
            grammar = await self._parts.model.grammars.get(constraint)
            if not outbox.is_closed:
                self._submit(submit, outbox, grammar)
        except InvalidRequest as error:
            outbox.put(Refused(submit.request_id, to_detail(error)))
        finally:
            self._compiling.pop(submit.request_id, None)

    def _submit(self, submit: Submit, outbox: Outbox, grammar: Grammar | None = None) -> None:
        refusal = self._refusal(submit)
        if refusal is not None:
            self._counters["refused"] += 1
            outbox.put(Refused(submit.request_id, to_detail(refusal)))
            return
        request = Request.new(submit, lambda: self._parts.new_table(submit.cache_salt), outbox, grammar)
        sequence = request.sequence
        self._requests[submit.request_id] = request
        self._by_sequence[sequence] = request
        self._empty.clear()
        self._all_released.clear()
        self._scheduler.add(sequence)
        cached_tokens = 0 if sequence.wants_prompt_logprobs else sequence.table.cached_prefix(sequence.token_ids)
        outbox.put(Accepted(submit.request_id, cached_tokens))

    def _refusal(self, submit: Submit) -> BatonError | None:
        limit, config = self._parts.model.spec.max_model_len, self._parts.config
        if self._draining:
            return Unavailable("the decode worker is draining", retry_after_s=RETRY_AFTER_S)
        if submit.request_id in self._requests:
            return InvalidRequest("the request is here already")
        if not submit.token_ids or len(submit.token_ids) + submit.sampling.max_tokens > limit:
            return InvalidRequest(f"prompt and max_tokens must be between 1 and {limit} tokens together")
        if not 1 <= len({sample.index for sample in submit.samples}) == len(submit.samples) <= config.max_num_seqs:
            return InvalidRequest(f"there may be 1 to {config.max_num_seqs} different samples of a prompt", param="n")
        beam = submit.sampling.beam
        if beam is not None and not len(submit.samples) <= beam.width <= config.max_num_seqs:
            return InvalidRequest(
                f"there may be at most {config.max_num_seqs} beams, and n of them", param="beam_width"
            )
        if len(self._requests) >= config.max_num_seqs + config.max_waiting:
            return Overloaded("the decode worker's queue is full", retry_after_s=RETRY_AFTER_S)
        return None

    def _planned(self, plan: Plan) -> None:
        request = self._requests.get(plan.request_id)
        if request is None or request.has_forked:
            return
        request.plan = plan
        if plan.kind is PlanKind.REMOTE and plan.transfer_id is not None:
            if request.offer is None and self._scheduler.stage(request.sequence) not in (Stage.RUNNING, Stage.SAVING):
                self._forget_transfer(request)
                request.transfer_id = plan.transfer_id
                self._expected.add(plan.transfer_id, request)
                self._scheduler.expect(request.sequence)
            return
        wants_cache = not request.sequence.wants_prompt_logprobs
        if plan.peer is not None and wants_cache and self._scheduler.stage(request.sequence) is Stage.HELD:
            self._group.create_task(self._fetch(request, plan, plan.peer))
        else:
            self._compute_here(request)

    async def _fetch(self, request: Request, plan: Plan, peer: PeerPrefix) -> None:
        """Bring the prefix that ``peer`` holds into the cache, if that is cheaper than computing it; then compute."""
        sequence, rate = request.sequence, self._stepper.meter.prompt_tokens_per_s
        salt = request.cache_salt
        fetched = await self._parts.fetcher.fetch(
            tuple(sequence.token_ids), peer, lambda: self._parts.new_table(salt), rate
        )
        if request.plan is plan and not request.gone:
            request.fetched_tokens = fetched
            self._compute_here(request)

    def _compute_here(self, request: Request) -> None:
        if request.pull is not None and request.offer is not None:
            self._parts.puller.stop(request.offer)  # what was pulled so far is kept, see _pull_ended
            return
        if request.offer is not None:
            self._parts.puller.cancel(request.offer, "computed by the decode worker")
        self._forget_transfer(request)
        self._scheduler.compute_here(request.sequence)
        request.ready_at = time.monotonic()
        self._wake.set()

    def _aborted(self, abort: Abort) -> None:
        if abort.request_id in self._compiling:
            self._compiling[abort.request_id].cancel()
        request = self._requests.get(abort.request_id)
        if request is None:
            return
        for index in abort.samples or tuple(request.samples):
            if index in request.samples:
                self._end_sample(request, index)

    # ---- prefill workers ----

    async def _offered(self, offer: Offer) -> OfferReply:
        if offer.decode_epoch != self._parts.epoch:
            self._counters["stale_offers"] += 1
            return OfferReply(False, "meant for an earlier life of this worker")
        request = await self._expected.find(offer.transfer_id)
        if request is None or request.offer is not None:
            return OfferReply(False, "not expected")
        request.offer = offer
        self._parts.puller.expect(offer)
        self._start(request, offer.cached_tokens, count=False)
        if request.wants_kv:
            self._scheduler.offered(request.sequence)
            request.ready_at = time.monotonic()
            self._wake.set()
        else:  # the prefill worker's token is the last one: take it, and no blocks
            self._begin_pull(request, request.sequence.num_tokens)
        return OfferReply(True)

    def _begin_pull(self, request: Request, have_tokens: int) -> None:
        assert request.offer is not None
        self._counters["pulls"] += 1
        block_ids = tuple(request.sequence.table.block_ids)
        request.pull = self._group.create_task(self._pull(request, request.offer, have_tokens, block_ids))

    async def _pull(self, request: Request, offer: Offer, have_tokens: int, block_ids: tuple[BlockId, ...]) -> None:
        outcome = await self._parts.puller.pull(
            offer, have_tokens, block_ids, lambda handover: self._handed_over(request, handover)
        )
        self._counters["pulled_tokens"] += outcome.num_tokens - have_tokens
        self._pull_ended(request, offer, outcome)

    def _handed_over(self, request: Request, handover: Handover) -> None:
        sequence = request.sequence
        if request.gone or sequence.num_tokens != handover.num_tokens:
            return
        if handover.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
            sequence.scored(0, handover.prompt_logprobs)
        if sequence.num_forks:
            sequence.sample_indices = ()  # all that it was to sample has come
        self._take(request, sequence, handover.tokens)

    def _pull_ended(self, request: Request, offer: Offer, outcome: PullOutcome) -> None:
        request.pull = None
        if outcome.error is None:
            self._parts.puller.done(offer)
        else:
            self._counters["pulls_failed"] += not request.gone
            self._parts.puller.cancel(offer, outcome.error.message)
        if request.gone:
            self._release(request)
            return
        if outcome.error is not None:
            log.warning("%s: pull failed, the rest is computed here: %s", request.request_id, outcome.error.message)
        self._forget_transfer(request)
        if self._scheduler.stage(request.sequence) is Stage.PULLING:
            self._scheduler.pulled(request.sequence, outcome.num_tokens)
            self._forks.fork_samples(request)
            self._advance_beams(request)
        else:  # only the token was wanted, and it did not come
            self._scheduler.compute_here(request.sequence)
        self._wake.set()

    def _forget_transfer(self, request: Request) -> None:
        if request.transfer_id is not None:
            self._expected.remove(request.transfer_id)
        request.transfer_id = None
        request.offer = None

    # ---- steps ----

    async def _step_loop(self) -> None:
        while True:
            step = self._scheduler.schedule(time.monotonic())
            for copy in step.copies:  # before anything else can happen to their blocks
                self._parts.model.storage.copy(copy.src, copy.dst)
            for slot in step.started:
                self._start(self._by_sequence[slot.sequence], slot.sequence.num_computed_tokens, count=True)
            for slot in step.pulls:
                self._begin_pull(self._by_sequence[slot.sequence], slot.sequence.num_computed_tokens)
            for slot in step.preempted:
                self._preempted(slot)
            if step.saving is not None:
                await self._save(step.saving.sequence)
                continue
            if step.chunks:
                await self._run(step)
                continue
            self._stepper.meter.idle()
            self._wake.clear()
            await self._wake.wait()

    def _preempted(self, slot: Slot) -> None:
        """Let the gateway of one that is to be computed again find out whether a prefill worker would be sooner."""
        sequence, request = slot.sequence, self._by_sequence[slot.sequence]
        log.info("%s: preempted", request.request_id)
        may_move = request.sequence is sequence and not sequence.num_forks and not request.has_forked
        if slot.stage is Stage.WAITING and may_move:
            request.is_replay, request.started = True, False
            cached_tokens = sequence.table.cached_prefix(sequence.token_ids)
            request.outbox.put(Preempted(request.request_id, cached_tokens))

    async def _save(self, sequence: Sequence) -> None:
        """Copy the blocks of a preempted sequence to host memory, then give them back."""
        await self._parts.compute.call(self._swap.saving(sequence))
        if sequence in self._by_sequence:
            self._scheduler.saved(sequence)
        else:  # it ended meanwhile
            self._swap.drop(sequence)

    async def _run(self, step: DecodeStep) -> None:
        for request in {self._by_sequence[chunk.sequence] for chunk in step.chunks}:
            if request.has_forked:
                self._sharing.observe([sequence.table for sequence in self._sequences_of(request)])
        before = self._swap.restoring(step.restored) if step.restored else None
        try:
            results = await self._stepper.run(step.chunks, before)
        except InternalError as error:
            for chunk in step.chunks:
                self._fail(chunk.sequence, error)
            return
        for result in results:
            self._computed(result)

    def _computed(self, result: Computed) -> None:
        chunk, sequence = result.chunk, result.chunk.sequence
        self._counters["prompt_tokens_computed"] += chunk.num_prompt_tokens
        request = self._by_sequence.get(sequence)
        if request is None or request.gone:  # aborted while the step ran
            return
        sequence.scored(sequence.num_computed_tokens, result.prompt_logprobs)
        self._scheduler.computed(chunk)
        if result.error is not None:
            self._fail(sequence, result.error)
            return
        self._forks.fork_samples(request)
        self._take(request, sequence, result.tokens)
        self._advance_beams(request)

    def _advance_beams(self, request: Request) -> None:
        answers = self._forks.advance_beams(request)
        if answers:
            self._counters["generation_tokens"] += sum(len(answer.output_ids) for answer in answers)
            request.report_answers(answers)
            self._leave(request, finished=True)

    def _adopt(self, request: Request, sequences: Iterable[Sequence]) -> None:
        self._by_sequence |= dict.fromkeys(sequences, request)

    def _start(self, request: Request, cached_tokens: int, *, count: bool) -> None:
        """Tell the gateway, once, that the prompt is being worked on; ``count`` its hits when they are ours."""
        if request.started:
            return
        request.started = True
        if count and not request.is_replay:
            self._hits.count(
                request.sequence.num_tokens,
                cached_tokens,
                fetched_tokens=request.fetched_tokens,
                peer=request.plan.peer if request.plan else None,
                tokens_per_s=self._stepper.meter.prompt_tokens_per_s,
            )
        request.outbox.put(Started(request.request_id, cached_tokens))

    def _take(self, request: Request, sequence: Sequence, tokens: Seq[SampledToken]) -> None:
        """Take the next tokens after ``sequence``."""
        if request.beams is None:
            self._append(request, tokens, sequence.num_tokens)
        elif tokens and tokens[0].logprobs is not None:
            request.beams.candidates[sequence] = tokens[0].logprobs

    def _append(self, request: Request, tokens: Iterable[SampledToken], num_tokens: int) -> None:
        request.report_prompt()
        for token in tokens:
            sequence = request.samples.get(token.sample_index)
            if sequence is not None and sequence.num_tokens == num_tokens:  # else it has the token already
                self._counters["generation_tokens"] += 1
                if request.append(sequence, token) is not None:
                    self._end_sample(request, token.sample_index, finished=True)

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        request = self._by_sequence.get(sequence)
        if request is not None:
            self._give_up(request, error)

    # ---- going out ----

    def _give_up(self, request: Request, error: BatonError) -> None:
        if not request.gone:
            request.report_failure(error)
            self._leave(request)

    def _end_sample(self, request: Request, index: int, *, finished: bool = False) -> None:
        """One sample is over; with the last one the request is."""
        if len(request.samples) == 1:
            self._leave(request, finished=finished)
            return
        sequence = request.samples.pop(index)
        if sequence in self._by_sequence:
            self._drop(sequence)

    def _leave(self, request: Request, *, finished: bool = False) -> None:
        """All samples are over; give their blocks back, now or when nothing can write to them any more."""
        if request.gone:
            return
        request.gone = True
        del self._requests[request.request_id]
        for sequence in self._sequences_of(request):
            self._scheduler.retire(sequence)
        if request.pull is not None:
            if not finished and request.offer is not None:  # a finished one ends by itself with the last token
                self._parts.puller.stop(request.offer)
                request.quarantined = request.sequence.table.quarantine()
        else:
            if request.offer is not None:
                self._parts.puller.cancel(request.offer, "not wanted any more")
            self._release(request)
        self._forget_transfer(request)
        if not self._requests:
            self._empty.set()

    def _release(self, request: Request) -> None:
        for sequence in self._sequences_of(request):
            self._drop(sequence)
        self._parts.model.pool.end_quarantine(request.quarantined)

    def _sequences_of(self, request: Request) -> list[Sequence]:
        """Return the request's sequences that are here: the first, or the samples or beams that have forked from it."""
        return [sequence for sequence in request.sequences() if sequence in self._by_sequence]

    def _drop(self, sequence: Sequence) -> None:
        """Forget a sequence, and give its blocks back when no step can write to them."""
        self._scheduler.retire(sequence)
        del self._by_sequence[sequence]
        self._swap.drop(sequence)
        self._stepper.release(sequence.table, sequence)
        if not self._by_sequence:
            self._all_released.set()
        self._wake.set()


def create(parts: Parts) -> DecodeEngine:
    """Return the engine of the decode role."""
    return DecodeEngine(parts)

"""One prompt and its samples, from the prompt to the last token, through refusals, replans and moves.

    choose a decode worker -> Submit -> Accepted -> choose who computes the prompt -> Plan (remote: and push to a queue)
    -> Started -> tokens ... -> finished

A refusal asks the next decode worker (:mod:`~gateway.request.candidates`). Who computes the prompt, and who does when
that fails, is the concern of :mod:`~gateway.request.prefilling`. A decode worker that is lost moves the prompt and the
output so far of the samples that are not complete to another one; tokens that came already are dropped by their index.
The flow owns its samples; whatever ends it, the decode worker is told (:class:`~gateway.request.attempt.Attempt`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from redis.asyncio import Redis

from common.errors import InternalError, Overloaded, TransferError, Unavailable
from common.ids import RequestId, WorkerId, new_request_id
from common.logprobs import TokenLogprobs
from common.messages import SequenceOutput, Submit
from common.sampling import SamplingParams
from gateway.request.attempt import Attempt, Stage
from gateway.request.candidates import Candidates
from gateway.request.prefilling import Prefilling
from gateway.request.route import Route
from gateway.request.sample import Sample
from gateway.router import WorkerView
from gateway.telemetry.cache_ledger import CacheLedger
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prefix_ledger import PrefixLedger
from gateway.text.text_stream import Piece
from gateway.workers.cluster import Cluster
from gateway.workers.locator import Located, Locator

log = logging.getLogger(__name__)

MOVABLE = (Unavailable, TransferError, Overloaded)
"""Errors of one decode worker that another one need not have."""


@dataclass(frozen=True, slots=True)
class FlowServices:
    """What all flows of a gateway share."""

    cluster: Cluster
    redis: Redis
    locator: Locator
    cache: CacheLedger
    prefixes: PrefixLedger
    metrics: Metrics
    accept_timeout_s: float
    max_migrations: int
    worker_wait_s: float
    reroute_wait_s: float


class Flow:
    """One prompt. ``emit`` is called with a sample's index and a piece of it; times are of the event loop's clock."""

    def __init__(
        self,
        services: FlowServices,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        samples: Sequence[Sample],
        *,
        arrived_at: float,
        deadline: float,
        cache_salt: str,
        emit: Callable[[int, Piece], None],
    ) -> None:
        self.prompt = prompt
        self.samples = samples
        """Each at its index."""
        self.cached_tokens = 0
        """Prompt tokens that were not computed when the prompt was, the first time."""
        self.prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        """Of the prompt's tokens from the second on, once they are known, if they were asked for."""
        self._services = services
        self._cluster = services.cluster
        self._sampling = sampling
        self._arrived_at = arrived_at
        self._cache_salt = cache_salt
        self._emit = emit
        self._name = new_request_id()
        self._located = Located()
        self._attempt: Attempt | None = None
        self._num_attempts = 0
        self._num_migrations = 0
        self._candidates = Candidates(services.cluster, wait_until=arrived_at + services.worker_wait_s)
        self._begun_at: float | None = None
        self._has_token = False
        self._prefilling = Prefilling(
            services.cluster,
            services.redis,
            services.metrics,
            num_prompt_tokens=len(prompt),
            cache_salt=cache_salt,
            deadline=deadline,
            has_begun=lambda: self._begun_at is not None,
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all samples so far."""
        return sum(sample.num_output_tokens for sample in self.samples)

    @property
    def route(self) -> Route | None:
        """How the prompt is routed, once that is decided."""
        attempt = self._attempt
        if attempt is None or attempt.choice is None:
            return None
        prefill = attempt.choice.prefill
        cached = self.cached_tokens if self._begun_at is not None else attempt.held_tokens
        return Route(
            attempt.choice.kind,
            attempt.worker.worker_id,
            None if prefill is None else prefill.worker_id,
            cached,
            attempt.choice.reason,
        )

    async def run(self) -> None:
        """Return when all samples are complete; raises BatonError when it cannot be completed."""
        while open_samples := [sample for sample in self.samples if sample.finish is None]:
            submit = self._new_submit(open_samples)
            self._located = await self._services.locator.locate(submit.shared_ids, self._cache_salt)
            worker = await self._candidates.next(len(submit.shared_ids), self._resident)
            with self._cluster.counted(worker, sequences=len(open_samples)):
                attempt = self._new_attempt(worker, submit)
                try:
                    await self._try(attempt)
                finally:
                    self.abort("the answer has ended")
            if any(sample.finish is None for sample in open_samples):
                self._learn(attempt)
        elapsed_s = asyncio.get_running_loop().time() - self._arrived_at
        self._services.metrics.ended(len(self.prompt), elapsed_s)
        log.info(
            "%s: %s, %d + %d tokens in %.3f s, %s",
            self._name,
            ", ".join(sample.finish or "unfinished" for sample in self.samples),
            len(self.prompt),
            self.num_output_tokens,
            elapsed_s,
            self.route.header() if self.route else "no route",
        )

    def abort(self, reason: str) -> None:
        """Tell the decode worker, if one has the sequence, that it is not wanted any more. Never waits."""
        if self._attempt is not None:
            self._attempt.leave(reason)

    # ---- from one decode worker to the next ----

    @property
    def _resident(self) -> Mapping[WorkerId, int]:
        """Tokens of the prompt's blocks by who holds them; nobody, when all tokens must be computed."""
        return self._located.num_tokens if self._sampling.prompt_logprobs is None else {}

    def _new_submit(self, samples: Sequence[Sample]) -> Submit:
        """Return what to ask the next decode worker for."""
        self._num_attempts += 1
        sampling = self._sampling
        if self.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return Submit(
            self._name if self._num_attempts == 1 else RequestId(f"{self._name}-{self._num_attempts}"),
            self.prompt,
            sampling,
            tuple(sample.state for sample in samples),
            self._cache_salt,
            is_replay=self._begun_at is not None,
        )

    def _new_attempt(self, worker: WorkerView, submit: Submit) -> Attempt:
        session = self._cluster.session(worker)
        attempt = Attempt(
            submit,
            worker,
            session,
            lambda cached_tokens: self._on_started(attempt, cached_tokens),
            self._on_prompt_logprobs,
            lambda output: self._on_output(attempt, output),
        )
        self._attempt = attempt
        return attempt

    def _learn(self, attempt: Attempt) -> None:
        """Draw the conclusions from an attempt that did not finish; raises when nobody else should try."""
        error = attempt.error or InternalError("the decode worker ended the answer without a reason")
        if not attempt.was_accepted:
            self._candidates.refused(attempt.worker, error)
            return
        if not isinstance(error, MOVABLE):
            raise error
        self._num_migrations += 1
        if self._num_migrations > self._services.max_migrations:
            raise Unavailable("the answer lost its decode worker too often", retry_after_s=1.0)
        log.warning("%s: leaves %s: %s", attempt.request_id, attempt.worker.worker_id, error.message)
        self._services.metrics.migrations.inc()
        wait_until = asyncio.get_running_loop().time() + self._services.reroute_wait_s
        self._candidates.lost(attempt.worker, error, wait_until=wait_until)

    # ---- one attempt ----

    async def _try(self, attempt: Attempt) -> None:
        try:
            attempt.begin()
            await attempt.wait_for(Stage.ACCEPTED, self._services.accept_timeout_s)
        except TimeoutError:
            attempt.error = Unavailable("the decode worker did not answer in time")
            return
        except Unavailable as error:
            attempt.error = error
            return
        if attempt.has_ended:
            return
        if self._num_migrations == 0:
            self._services.metrics.prompt_tokens.inc(len(self.prompt))
        await self._prefilling.run(attempt, self._resident)
        while await attempt.wait_preempted():
            written = tuple(sample.state for sample in self.samples if sample.finish is None)
            attempt.restart(msgspec.structs.replace(attempt.submit, samples=written, is_replay=True))
            await self._prefilling.run(attempt, self._resident)

    # ---- what comes back ----

    def _on_started(self, attempt: Attempt, cached_tokens: int) -> None:
        """Note, the first time, that work on the prompt has begun."""
        if self._begun_at is None and attempt.choice is not None:
            self._begun_at = asyncio.get_running_loop().time()
            self.cached_tokens = min(cached_tokens, len(self.prompt))
            queue_s = self._begun_at - self._arrived_at
            self._note_prefix(cached_tokens)
            self._services.metrics.begun(attempt.choice.kind, len(self.prompt), self.cached_tokens, queue_s)

    def _note_prefix(self, cached_tokens: int) -> None:
        located, now = self._located, asyncio.get_running_loop().time()
        cached_blocks = cached_tokens // located.block_size
        self._services.prefixes.begun(self.prompt, located.chain, cached_blocks, located.block_size, now)

    def _on_prompt_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        if self.prompt_logprobs is None:
            self.prompt_logprobs = logprobs

    def _on_output(self, attempt: Attempt, output: SequenceOutput) -> None:
        """Take what a step brought a sample; raises BatonError when it does not fit what came before."""
        sample, now = self.samples[output.sample_index], asyncio.get_running_loop().time()
        piece = sample.take(output, now)
        if piece is None:
            return
        self._measure(sample, len(piece.token_ids), now)
        self._emit(sample.index, piece)
        if piece.finish is not None:
            self._services.metrics.answered(piece.finish, sample.num_output_tokens, sample.decode_s)
            if output.finish is None:
                attempt.leave_sample(sample.index, "a stop string was found")

    def _measure(self, sample: Sample, num_tokens: int, now: float) -> None:
        if num_tokens == 0:
            return
        metrics = self._services.metrics
        metrics.generation_tokens.inc(num_tokens)
        if not self._has_token:
            self._has_token = True
            metrics.first_token(now - self._arrived_at, now - (self._begun_at or now))
        is_first = sample.num_output_tokens == num_tokens
        metrics.further_tokens(num_tokens - is_first, sample.gap_s)

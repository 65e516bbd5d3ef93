"""How the prompt of an attempt is computed: by the decode worker, or by a prefill worker that hands it over.

    choose -> Plan (remote: and push to the prefill worker's queue) -> Started -> first token -> blocks moved

A prefill worker that is lost or late before the first token gets a new plan; what of the blocks does not come after it
is computed by the decode worker.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping

from redis.asyncio import Redis

from common import queue
from common.ids import WorkerId, new_transfer_id
from common.messages import Plan, PlanKind, Prefill
from common.redis_client import CALL_TIMEOUT_S, RedisUnavailable
from gateway.request.attempt import Attempt, Stage
from gateway.router import PlanChoice, Reason, WorkerView, choose_plan
from gateway.telemetry.metrics import Metrics
from gateway.workers.cluster import Cluster

log = logging.getLogger(__name__)

PATIENCE_S = 5.0
PATIENCE_FACTOR = 4.0
"""A prefill worker must begin within PATIENCE_S plus this many times the estimated wait; else the decode worker does it
all. That also covers what a flush of Redis has lost."""


class Prefilling:
    """Has one prompt computed, on each attempt. Owned by its flow.

    ``deadline`` is of the event loop's clock; ``has_begun`` says whether work on the prompt began, on any attempt.
    """

    def __init__(
        self,
        cluster: Cluster,
        redis: Redis,
        metrics: Metrics,
        *,
        num_prompt_tokens: int,
        cache_salt: str,
        deadline: float,
        has_begun: Callable[[], bool],
    ) -> None:
        self._cluster = cluster
        self._redis = redis
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._cache_salt = cache_salt
        self._deadline = deadline
        self._has_begun = has_begun

    async def run(self, attempt: Attempt, resident: Mapping[WorkerId, int]) -> None:
        """Return when the prompt's KV is in place or the attempt has ended; plan again as often as it takes.

        ``resident`` are the tokens of the prompt's blocks by who holds them.
        """
        insist: Reason | None = None
        while attempt.stage < Stage.WRITING:
            choice = self._choose(attempt, insist, resident)
            attempt.choice = choice
            attempt.prefill_left = False
            self._metrics.planned(choice)
            if choice.prefill is None:
                await self._compute_local(attempt)
            else:
                insist = await self._compute_remote(attempt, choice.prefill, choice.wait_s)

    def _choose(self, attempt: Attempt, insist: Reason | None, resident: Mapping[WorkerId, int]) -> PlanChoice:
        if insist is not None:
            return PlanChoice(PlanKind.LOCAL, insist)
        return choose_plan(
            self._cluster.view(),
            attempt.worker,
            num_tokens=len(attempt.submit.shared_ids),
            cached_tokens=attempt.held_tokens,
            limits=self._cluster.limits,
            resident=resident,
            draw=random.random(),
        )

    async def _compute_local(self, attempt: Attempt) -> None:
        with self._cluster.counted(attempt.worker, tokens=self._num_missing(attempt)):
            peer = None if attempt.choice is None else attempt.choice.peer
            gently = attempt.choice is not None and attempt.choice.reason is Reason.PREFILL_BUSY
            await attempt.plan(Plan(attempt.request_id, PlanKind.LOCAL, peer=peer, gently=gently))
            await attempt.wait_for(Stage.WRITING, None)

    async def _compute_remote(self, attempt: Attempt, prefill: WorkerView, wait_s: float) -> Reason | None:
        """Return when the first token has come, the attempt has ended, or the prefill worker failed.

        Of the last: None when another prefill worker may be asked, else why the decode worker has to do it.
        """
        with self._cluster.watched(prefill, attempt.prefill_has_left):
            with self._cluster.counted(prefill, tokens=self._num_missing(attempt)):
                insist = await self._wait_computed(attempt, prefill, wait_s)
            if insist is None and attempt.stage >= Stage.WRITING:
                await self._wait_moved(attempt, prefill)
            return insist

    async def _wait_computed(self, attempt: Attempt, prefill: WorkerView, wait_s: float) -> Reason | None:
        """Queue the prompt and wait for its first token; returns as :meth:`_compute_remote`."""
        if not await self._push(attempt, prefill):
            return Reason.REDIS_UNAVAILABLE
        try:
            await attempt.wait_for_prefill(Stage.STARTED, PATIENCE_S + PATIENCE_FACTOR * wait_s)
        except TimeoutError:
            log.warning("%s: %s has not begun in time", attempt.request_id, prefill.worker_id)
            return Reason.PREFILL_LATE
        if attempt.stage < Stage.STARTED:
            log.warning("%s: %s takes nothing any more, or lost its queue", attempt.request_id, prefill.worker_id)
            return None
        return await self._wait_first_token(attempt, prefill)

    async def _wait_moved(self, attempt: Attempt, prefill: WorkerView) -> None:
        """Wait until a second token shows that the prompt's blocks have come; without them the decode worker computes
        what is missing."""
        while attempt.stage < Stage.FLOWING:
            await attempt.wait_for_prefill(Stage.FLOWING, None)
            if attempt.prefill_left and not self._cluster.is_alive(prefill):
                log.warning("%s: %s was lost while its blocks were moved", attempt.request_id, prefill.worker_id)
                await attempt.plan(Plan(attempt.request_id, PlanKind.LOCAL))
                return
            attempt.prefill_left = False

    async def _push(self, attempt: Attempt, prefill: WorkerView) -> bool:
        """Announce the transfer to the decode worker, then queue the prompt; return whether that went well."""
        transfer_id = new_transfer_id()
        await attempt.plan(Plan(attempt.request_id, PlanKind.REMOTE, transfer_id))
        if attempt.has_ended:
            return True
        task = Prefill(
            request_id=attempt.request_id,
            transfer_id=transfer_id,
            token_ids=attempt.submit.shared_ids,
            num_prompt_tokens=self._num_prompt_tokens,
            sampling=attempt.submit.sampling,
            decode_worker=attempt.worker.worker_id,
            decode_epoch=attempt.worker.record.epoch,
            decode_address=attempt.worker.record.address,
            remaining_s=self._deadline - asyncio.get_running_loop().time(),
            cache_salt=self._cache_salt,
            peer=None if attempt.choice is None else attempt.choice.peer,
            is_replay=self._has_begun(),
            sample_indices=attempt.submit.next_indices,
        )
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await queue.push(self._redis, prefill.worker_id, prefill.record.epoch, task)
        except RedisUnavailable as error:
            log.warning("%s: the prompt could not be queued: %s", attempt.request_id, error)
            return False
        return True

    async def _wait_first_token(self, attempt: Attempt, prefill: WorkerView) -> Reason | None:
        while attempt.stage < Stage.WRITING:
            await attempt.wait_for_prefill(Stage.WRITING, None)
            if attempt.prefill_left and not self._cluster.is_alive(prefill):
                log.warning("%s: %s was lost before the first token", attempt.request_id, prefill.worker_id)
                return Reason.PREFILL_LOST
            attempt.prefill_left = False  # draining: it finishes what it has begun
        return None

    def _num_missing(self, attempt: Attempt) -> int:
        """Return what the plan adds to its worker's queue; all that the decode worker lacks, when it has to do it."""
        if attempt.choice is not None and attempt.choice.work_tokens:
            return attempt.choice.work_tokens
        return len(attempt.submit.shared_ids) - attempt.held_tokens

"""What a gateway plans for a request that is here: a prefill worker computes its prompt, or this worker does.

A plan may come again, as long as the samples have not forked from the prompt; the last one holds.
"""

import asyncio
import time

from common.messages import PeerPrefix, Plan, PlanKind
from decode_worker.request import Request
from decode_worker.roster import Roster
from decode_worker.scheduler import DecodeScheduler
from decode_worker.slots import Stage
from decode_worker.transfers import Transfers
from kvstore.host.meter import StepMeter
from kvstore.host.parts import Parts


class Plans:
    """Follows plans; fetches of a peer's prefix run as tasks of ``group``. ``wake`` is set when one can be computed."""

    def __init__(
        self,
        parts: Parts,
        meter: StepMeter,
        scheduler: DecodeScheduler,
        roster: Roster,
        transfers: Transfers,
        group: asyncio.TaskGroup,
        wake: asyncio.Event,
    ) -> None:
        self._parts = parts
        self._meter = meter
        self._scheduler = scheduler
        self._roster = roster
        self._transfers = transfers
        self._group = group
        self._wake = wake

    def follow(self, plan: Plan) -> None:
        """Begin what ``plan`` says; a request that is not here any more, or has forked, is left alone."""
        request = self._roster.get(plan.request_id)
        if request is None or request.has_forked:
            return
        request.plan = plan
        stage = self._scheduler.stage(request.sequence)
        if plan.kind is PlanKind.REMOTE and plan.transfer_id is not None:
            if request.offer is None and stage not in (Stage.RUNNING, Stage.SAVING):
                self._transfers.expect(request, plan.transfer_id)
                self._scheduler.expect(request.sequence)
            return
        wants_cache = not request.sequence.wants_prompt_logprobs
        if plan.peer is not None and wants_cache and stage is Stage.HELD:
            self._group.create_task(self._fetch(request, plan, plan.peer))
        else:
            self._compute_here(request)

    async def _fetch(self, request: Request, plan: Plan, peer: PeerPrefix) -> None:
        """Bring the prefix that ``peer`` holds into the cache, if that is cheaper than computing it; then compute."""
        salt = request.cache_salt
        fetched = await self._parts.fetcher.fetch(
            tuple(request.sequence.token_ids),
            peer,
            lambda: self._parts.new_table(salt),
            self._meter.prompt_tokens_per_s,
        )
        if request.plan is plan and not request.gone:
            request.fetched_tokens = fetched
            self._compute_here(request)

    def _compute_here(self, request: Request) -> None:
        if request.pull is not None and request.offer is not None:
            self._transfers.stop(request)  # what was pulled so far is kept, see decode_worker.pulls
            return
        self._transfers.withdraw(request, "computed by the decode worker")
        self._scheduler.compute_here(request.sequence, gently=request.plan is not None and request.plan.gently)
        request.ready_at = time.monotonic()
        self._wake.set()

"""What prefill workers bring: their offers, and the pulls of the blocks and first tokens that they hand over.

A pull that fails keeps what came; the rest is computed here. One whose request has left ends on its own, and gives the
blocks back when it has.
"""

import asyncio
import logging
import time

from common.ids import BlockId
from common.messages import Handover, Offer, OfferReply
from decode_worker.answers import Answers
from decode_worker.request import Request
from decode_worker.roster import Roster
from decode_worker.scheduler import DecodeScheduler
from decode_worker.slots import Stage
from decode_worker.transfers import Transfers
from kvstore.host.parts import Parts
from kvstore.transfer_client import PullOutcome

log = logging.getLogger(__name__)


class Pulls:
    """Owns the pulls that run, as tasks of ``group``. ``wake`` is set when there is more to schedule."""

    def __init__(
        self,
        parts: Parts,
        scheduler: DecodeScheduler,
        roster: Roster,
        transfers: Transfers,
        answers: Answers,
        group: asyncio.TaskGroup,
        wake: asyncio.Event,
    ) -> None:
        self._epoch = parts.epoch
        self._puller = parts.puller
        self._scheduler = scheduler
        self._roster = roster
        self._transfers = transfers
        self._answers = answers
        self._group = group
        self._wake = wake
        self._counters = dict.fromkeys(("pulls", "pulls_failed", "pulled_tokens", "stale_offers"), 0)

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return self._counters.copy()

    async def offered(self, offer: Offer) -> OfferReply:
        """Take the offer of a prefill worker, if a request here expects it."""
        if offer.decode_epoch != self._epoch:
            self._counters["stale_offers"] += 1
            return OfferReply(False, "meant for an earlier life of this worker")
        request = await self._transfers.find(offer.transfer_id)
        if request is None or request.offer is not None:
            return OfferReply(False, "not expected")
        self._transfers.offered(request, offer)
        request.report_started(offer.cached_tokens)
        if request.wants_kv:
            self._scheduler.offered(request.sequence)
            request.ready_at = time.monotonic()
            self._wake.set()
        else:  # the prefill worker's token is the last one: take it, and no blocks
            self.begin(request, request.sequence.num_tokens)
        return OfferReply(True)

    def begin(self, request: Request, have_tokens: int) -> None:
        """Pull into the blocks of a request that was offered; its first ``have_tokens`` tokens are there."""
        assert request.offer is not None
        self._counters["pulls"] += 1
        block_ids = tuple(request.sequence.table.block_ids)
        request.pull = self._group.create_task(self._pull(request, request.offer, have_tokens, block_ids))

    async def _pull(self, request: Request, offer: Offer, have_tokens: int, block_ids: tuple[BlockId, ...]) -> None:
        outcome = await self._puller.pull(
            offer, have_tokens, block_ids, lambda handover: self._handed_over(request, handover)
        )
        self._counters["pulled_tokens"] += outcome.num_tokens - have_tokens
        self._ended(request, offer, outcome)

    def _handed_over(self, request: Request, handover: Handover) -> None:
        sequence = request.sequence
        if request.gone or sequence.num_tokens != handover.num_tokens:
            return
        if handover.prompt_logprobs is not None and sequence.wants_prompt_logprobs:
            sequence.scored(0, handover.prompt_logprobs)
        if sequence.num_forks:
            sequence.sample_indices = ()  # all that it was to sample has come
        self._answers.take(request, sequence, handover.tokens)

    def _ended(self, request: Request, offer: Offer, outcome: PullOutcome) -> None:
        request.pull = None
        if outcome.error is None:
            self._puller.done(offer)
        else:
            self._counters["pulls_failed"] += not request.gone
            self._puller.cancel(offer, outcome.error.message)
        if request.gone:
            self._roster.release(request)
            return
        if outcome.error is not None:
            log.warning("%s: pull failed, the rest is computed here: %s", request.request_id, outcome.error.message)
        self._transfers.forget(request)
        if self._scheduler.stage(request.sequence) is Stage.PULLING:
            self._scheduler.pulled(request.sequence, outcome.num_tokens)
            self._answers.pulled(request)
        else:  # only the token was wanted, and it did not come
            self._scheduler.compute_here(request.sequence)
        self._wake.set()

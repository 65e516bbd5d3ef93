"""Leases of the blocks that leave a prefill worker: opened with a prompt's first chunk, and offered to the decode
worker that waits for them."""

import asyncio
import logging

from common.errors import BatonError, InvalidRequest
from common.messages import Offer, OfferReply, Role
from common.services import OFFER
from kvstore.host.hit_counter import HitCounter
from kvstore.host.meter import StepMeter
from kvstore.host.parts import Parts
from kvstore.outgoing import Outgoing
from prefill_worker.job import Job

log = logging.getLogger(__name__)

OFFER_TIMEOUT_S = 5.0
"""A decode worker that does not answer an offer for this long has lost it."""


class Leases:
    """Opens, offers and closes. How one ends is told to the engine, by the transfer server."""

    def __init__(self, parts: Parts, meter: StepMeter, group: asyncio.TaskGroup) -> None:
        self._parts = parts
        self._meter = meter
        self._group = group
        self._hits = HitCounter(Role.PREFILL)
        self._num_refused = 0

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return self._hits.counters() | {"offers_refused": self._num_refused}

    def begin(self, job: Job) -> None:
        """The prompt has its blocks: open the lease and offer it."""
        sequence, task = job.sequence, job.task
        job.cached_tokens = sequence.num_computed_tokens
        if not task.is_replay:
            self._hits.count(
                sequence.num_tokens,
                job.cached_tokens,
                fetched_tokens=job.fetched_tokens,
                peer=task.peer,
                tokens_per_s=self._meter.prompt_tokens_per_s,
            )
        job.outgoing = self._parts.transfers.open(job.transfer_id, tuple(sequence.table.block_ids))
        job.outgoing.advance(sequence.num_computed_tokens)
        self._group.create_task(self._offer(job, job.outgoing))

    def refuse(self, job: Job, error: InvalidRequest) -> None:
        """Offer a transfer that has failed, so that the decode worker hears why."""
        job.outgoing = self._parts.transfers.open(job.transfer_id, ())
        job.outgoing.fail(error)
        self._group.create_task(self._offer(job, job.outgoing))

    def close(self, job: Job) -> None:
        """End the lease from this side."""
        self._parts.transfers.close(job.transfer_id)

    async def _offer(self, job: Job, outgoing: Outgoing) -> None:
        task, parts = job.task, self._parts
        offer = Offer(
            transfer_id=task.transfer_id,
            worker_id=parts.worker_id,
            epoch=parts.epoch,
            address=parts.address,
            generation=outgoing.generation,
            cached_tokens=job.cached_tokens,
            decode_epoch=task.decode_epoch,
        )
        try:
            with parts.peers.use(task.decode_address) as client:
                reply: OfferReply = await client.call(OFFER, offer, OFFER_TIMEOUT_S)
        except BatonError as error:
            reply = OfferReply(False, error.message)
        if not reply.accepted:
            self._num_refused += 1
            log.info("%s: offer refused: %s", task.request_id, reply.reason)
            self.close(job)

"""Tells the registry every second how a worker is, and checks the pool's books when it goes idle."""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from dataclasses import asdict

from msgspec.structs import replace

from common.messages import Role, WorkerRecord, WorkerState
from common.redis_client import RedisUnavailable
from common.registry import HEARTBEAT_S, publish, withdraw
from kvstore.block_pool import IntegrityError
from kvstore.host.engine import Engine
from kvstore.host.parts import Parts

log = logging.getLogger(__name__)


class Heartbeat:
    """Publishes one worker's record. Redis away is logged once, and once when it is back; the work goes on."""

    def __init__(self, parts: Parts, role: Role, engine: Engine, state: Callable[[], WorkerState]) -> None:
        self._parts = parts
        self._role = role
        self._engine = engine
        self._state = state
        self._redis_is_up = True
        self._was_idle = True
        self._num_integrity_failures = 0
        self._num_evictions_before = parts.model.pool.num_evictions  # by earlier lives, which have told of them

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self.beat()
            await asyncio.sleep(HEARTBEAT_S)

    async def beat(self) -> None:
        """Publish the record as it is now."""
        record = self.record()
        self._check_when_idle(record)
        try:
            await publish(self._parts.redis, record)
        except RedisUnavailable as error:
            if self._redis_is_up:
                log.warning("Redis cannot be reached, serving goes on without it: %s", error)
            self._redis_is_up = False
            return
        if not self._redis_is_up:
            log.info("Redis is back")
        self._redis_is_up = True

    async def withdraw(self) -> None:
        """Take the record away at the end of an orderly shutdown."""
        try:
            await withdraw(self._parts.redis, self._parts.worker_id)
        except RedisUnavailable as error:
            log.warning("the record was not withdrawn, it will expire: %s", error)

    def record(self) -> WorkerRecord:
        """Return what there is to say about this worker."""
        parts, model = self._parts, self._parts.model
        counters = self._engine.counters() | {
            "integrity_failures": self._num_integrity_failures,
            "evictions": model.pool.num_evictions - self._num_evictions_before,
            "prefix_loans": parts.lender.num_loans,
        }
        counters |= parts.fetcher.counters()
        for name, counts in (
            ("lend", parts.transfers.counters),
            ("pull", parts.puller.counters),
            ("lease", parts.puller.leases.counters),
        ):
            counters |= {f"{name}_{key}": value for key, value in asdict(counts).items()}
        return WorkerRecord(
            worker_id=parts.worker_id,
            role=self._role,
            epoch=parts.epoch,
            pid=os.getpid(),
            address=parts.address,
            state=self._state(),
            device=str(model.spec.device),
            fingerprint=model.fingerprint,
            model=parts.config.served_model_name or model.spec.name,
            max_model_len=model.spec.max_model_len,
            load=replace(self._engine.load(time.monotonic()), pull_tokens_per_s=parts.fetcher.meter.tokens_per_s),
            blocks=model.pool.counts(),
            slots=self._engine.slots(),
            counters=counters,
        )

    def _check_when_idle(self, record: WorkerRecord) -> None:
        idle = record.load.running + record.load.waiting == 0
        if idle and not self._was_idle:
            try:
                self._parts.model.pool.check_integrity(self._parts.holders(self._engine.tables()))
            except IntegrityError as error:
                self._num_integrity_failures += 1
                log.error("the block pool's books do not balance: %s", error)
        self._was_idle = idle

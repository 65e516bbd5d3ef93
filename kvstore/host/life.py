"""One life of a worker: one role under one epoch, on a model and blocks that outlast it.

Life: announce READY, work; told to stop or to take the other role, announce DRAINING and let running work end for a
while; for another role, hand back what is left, so that others go on with it. Then this epoch is over: its leases have
ended, its queue and its entries in the index are gone, and no step runs. What is cached stays, and the next life
announces it as its own.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.asyncio import Redis

from common.errors import InternalError
from common.ids import TransferId, WorkerId, new_epoch
from common.messages import HelloReply, Role, WorkerState
from common.rpc import RpcServer
from kvstore.host.compute_thread import ComputeThread
from kvstore.host.config import WorkerConfig
from kvstore.host.control import Control, Fence
from kvstore.host.engine import Engine, create_engine
from kvstore.host.heartbeat import Heartbeat
from kvstore.host.index_publisher import IndexPublisher
from kvstore.host.metrics import HostMetrics
from kvstore.host.parts import ModelParts, Parts
from kvstore.lease import LeaseTable
from kvstore.lease_keeper import RENEW_S
from kvstore.lender import Lender
from kvstore.outgoing import ReleaseReason
from kvstore.peers import PeerSet
from kvstore.prefix_fetcher import PrefixFetcher
from kvstore.pull_meter import PullMeter
from kvstore.transfer_client import TransferClient
from kvstore.transfer_server import TransferServer

log = logging.getLogger(__name__)

RENEW_SHARE = 1 / 6
"""Part of a lease's time after which it is renewed, so that several renewals may fail."""

MAX_TICK_AGE_S = 10.0
"""A worker with work whose step loop has not turned for this long says that it is not ready."""

HAND_BACK_S = 10.0
"""Giving back all blocks takes at most so long; a worker that cannot must start anew."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a worker keeps from one life to the next. Owned by the host."""

    config: WorkerConfig
    worker_id: WorkerId
    address: str
    model: ModelParts
    metrics: HostMetrics
    compute: ComputeThread
    redis: Redis
    peers: PeerSet
    pull_meter: PullMeter
    fence: Fence


class Life:
    """Owns the engine of ``role`` and all that speaks for its epoch.

    ``prompt_tokens_per_s`` is what the life before measured; ``remember`` is called with a role that is to be taken.
    """

    def __init__(
        self, standing: Standing, role: Role, prompt_tokens_per_s: float, *, remember: Callable[[Role], None]
    ) -> None:
        self.next_role: Role | None = None
        """The role to take when this life is over; None: none, the process ends."""
        self._role = role
        self._remember = remember
        self.parts = self._make_parts(standing, prompt_tokens_per_s)
        self.engine: Engine = create_engine(role, self.parts)
        self._state = WorkerState.STARTING
        self._drain_s = standing.config.drain_seconds
        self._over = asyncio.Event()
        self._control = Control(
            self.parts, role, self.engine, standing.fence, state=lambda: self._state, stop=self.stop, change=self.change
        )
        self._heartbeat = Heartbeat(self.parts, role, self.engine, lambda: self._state)
        standing.metrics.show(self._heartbeat.record)

    def unready(self) -> str:
        """Say why this worker takes no work; empty when it does."""
        if self._state is not WorkerState.READY:
            return self._state
        age_s = self.engine.load(time.monotonic()).tick_age_s
        return f"the step loop has not turned for {age_s:.0f} s" if age_s > MAX_TICK_AGE_S else ""

    def stop(self) -> None:
        """Ask for an orderly end of the process; returns at once."""
        self.next_role = None
        self._over.set()

    def change(self, role: Role, drain_s: float) -> None:
        """Ask for an orderly change to ``role``; returns at once. Running work gets ``drain_s`` seconds."""
        self._remember(role)
        self.next_role = role
        self._drain_s = drain_s
        self._over.set()

    async def run(self, server: RpcServer, ready: asyncio.Event) -> None:
        """Live on ``server`` until told otherwise, and set ``ready`` once the registry has been told.

        Raises InternalError when another role cannot be taken because blocks could not be given back.
        """
        parts = self.parts
        served = parts.transfers.handlers().merged(parts.lender.handlers()).merged(self.engine.handlers())
        server.mount(served.merged(self._control.handlers()))
        publisher = IndexPublisher(parts.redis, parts.worker_id, parts.epoch, parts.model.pool)
        async with asyncio.TaskGroup() as group:
            working = group.create_task(self.engine.run())
            serving = [group.create_task(one.run()) for one in (publisher, parts.transfers, parts.puller)]
            serving.append(group.create_task(parts.model.transports.run()))
            self._state = WorkerState.READY
            await self._heartbeat.beat()
            serving.append(group.create_task(self._heartbeat.run()))
            ready.set()
            log.info("ready as a %s worker on %s, epoch %d", self._role, parts.address, parts.epoch)
            await self._over.wait()
            await self._drain()
            if self.next_role is not None:
                await self._hand_back()
            working.cancel()
            await asyncio.wait((working,))
            if self.next_role is not None:
                await self._settle()
            for task in serving:
                task.cancel()
        await publisher.withdraw()
        if self.next_role is None:
            await self._heartbeat.withdraw()
        else:
            self._check_given_back()

    async def _drain(self) -> None:
        self._state = WorkerState.DRAINING
        log.info("draining for up to %g s", self._drain_s)
        await self._heartbeat.beat()
        try:
            async with asyncio.timeout(self._drain_s):
                await self.engine.drain()
                await self.parts.lender.wait_returned()
                await self.parts.puller.wait_told()
        except TimeoutError:
            log.warning("work was left after %g s of draining", self._drain_s)

    async def _hand_back(self) -> None:
        try:
            async with asyncio.timeout(HAND_BACK_S):
                await self.engine.hand_back()
        except TimeoutError:
            log.warning("not everything was handed back within %g s", HAND_BACK_S)

    async def _settle(self) -> None:
        """Return when nothing of this life can touch a block any more."""
        parts = self.parts
        await parts.compute.call(lambda: None)  # a step that was left alone has ended now
        parts.transfers.close_all()
        try:
            async with asyncio.timeout(HAND_BACK_S):
                await parts.puller.wait_told()
        except TimeoutError:
            log.warning("some workers could not be told that their blocks are not needed; their leases will end")

    def _check_given_back(self) -> None:
        counts = self.parts.model.pool.counts()
        if counts.held or counts.quarantined:
            raise InternalError(f"{counts.held} blocks are held and {counts.quarantined} are set aside by nobody")

    def _make_parts(self, standing: Standing, prompt_tokens_per_s: float) -> Parts:
        config, model = standing.config, standing.model
        identity = HelloReply(standing.worker_id, new_epoch(), model.fingerprint, model.transports.offers())
        loop = asyncio.get_running_loop()

        def on_release(transfer_id: TransferId, reason: ReleaseReason) -> None:
            if not lender.released(transfer_id):
                self.engine.released(transfer_id, reason)

        leases = LeaseTable(config.lease_s)
        transfers = TransferServer(model.storage, config.block_size, identity, leases, on_release, loop.time)
        lender = Lender(model.pool, transfers, identity.epoch)
        renew_s = min(RENEW_S, config.lease_s * RENEW_SHARE)
        puller = TransferClient(
            model.storage,
            config.block_size,
            identity,
            standing.peers,
            renew_s=renew_s,
            transports=model.transports,
            on_pulled=standing.metrics.pulled,
        )
        return Parts(
            config=config,
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            address=standing.address,
            model=model,
            metrics=standing.metrics,
            compute=standing.compute,
            redis=standing.redis,
            transfers=transfers,
            puller=puller,
            peers=standing.peers,
            lender=lender,
            fetcher=PrefixFetcher(puller, standing.peers, config.block_size, identity.epoch, meter=standing.pull_meter),
            prompt_tokens_per_s=prompt_tokens_per_s,
        )

"""A worker process: loads the model, runs one role's engine, and shuts down in order.

Life: bind the port, load the model, announce READY, work; on SIGTERM or SIGINT announce DRAINING, let running work end
within ``drain_seconds``, withdraw, stop.
"""

import asyncio
import logging
import signal
import time
from urllib.parse import urlsplit

from redis.asyncio import Redis

from common.addresses import reachable
from common.ids import TransferId, WorkerId, new_epoch
from common.logs import configure
from common.messages import HelloReply, Role, SlotCounts, WorkerState
from common.redis_client import connect
from common.rpc import Handlers, RpcServer
from common.tls import load_tls
from kvstore.host.config import WorkerConfig
from kvstore.host.control import Control
from kvstore.host.engine import Engine, create_engine
from kvstore.host.heartbeat import Heartbeat
from kvstore.host.index_publisher import IndexPublisher
from kvstore.host.metrics import HostMetrics
from kvstore.host.parts import Parts, load_model_parts
from kvstore.host.stepper import ComputeThread
from kvstore.host.watch import WatchServer
from kvstore.lease import LeaseTable
from kvstore.lease_keeper import RENEW_S
from kvstore.lender import Lender
from kvstore.outgoing import ReleaseReason
from kvstore.peers import PeerSet
from kvstore.prefix_fetcher import PrefixFetcher
from kvstore.transfer_client import TransferClient
from kvstore.transfer_server import TransferServer

log = logging.getLogger(__name__)

RENEW_SHARE = 1 / 6
"""Part of a lease's time after which it is renewed, so that several renewals may fail."""

MAX_TICK_AGE_S = 10.0
"""A worker with work whose step loop has not turned for this long says that it is not ready."""

RPC_GRACE_S = 0.5
"""Calls that still run when everything else has ended get this long."""


class Host:
    """One worker process in one role. Owns every part of it."""

    def __init__(self, config: WorkerConfig, role: Role) -> None:
        self._config = config
        self._role = role
        self._worker_id = WorkerId(config.name_for(role))
        self._state = WorkerState.STARTING
        self._stop = asyncio.Event()
        self.ready = asyncio.Event()
        """Set once the worker takes work and the registry has been told."""
        self._metrics = HostMetrics()
        self.parts: Parts | None = None
        """What the worker runs on, once its model is loaded."""
        self.metrics_port = 0
        """Where /metrics is served; 0 when nowhere."""

    def stop(self) -> None:
        """Ask for an orderly shutdown; returns at once."""
        self._stop.set()

    def _unready(self) -> str:
        """Say why this worker takes no work; empty when it does."""
        if self._state is not WorkerState.READY:
            return self._state
        age_s = self._engine.load(time.monotonic()).tick_age_s
        return f"the step loop has not turned for {age_s:.0f} s" if age_s > MAX_TICK_AGE_S else ""

    def counters(self) -> dict[str, int]:
        """Return the engine's counts since the start."""
        return self._engine.counters()

    def slots(self) -> SlotCounts:
        """Return how well the held blocks are filled."""
        return self._engine.slots()

    async def run(self) -> None:
        """Serve until :meth:`stop`; raises ConfigError or UnsupportedModel when it cannot begin."""
        config = self._config
        tls = load_tls(config.tls_cert, config.tls_key, config.tls_ca)
        server = RpcServer(config.host, config.port, Handlers({}, {}, {}), config.cluster_token, tls)
        redis = connect(config.redis)
        peers = PeerSet(config.cluster_token, tls)
        compute = ComputeThread()
        watch = WatchServer(self._metrics.registry, self._unready)
        try:
            await server.start()
            if config.metrics_port is not None:
                self.metrics_port = await watch.start(config.host, config.metrics_port)
            self.parts = await self._load(server, redis, peers, compute)
            await self._serve(server, self.parts)
        finally:
            watch.stop()
            await server.stop(RPC_GRACE_S)
            await peers.close()
            await redis.aclose()
            compute.close()
        log.info("stopped")

    async def _load(self, server: RpcServer, redis: Redis, peers: PeerSet, compute: ComputeThread) -> Parts:
        model = await compute.call(lambda: load_model_parts(self._config))
        identity = HelloReply(self._worker_id, new_epoch(), model.fingerprint)
        loop = asyncio.get_running_loop()

        def on_release(transfer_id: TransferId, reason: ReleaseReason) -> None:
            if not lender.released(transfer_id):
                self._engine.released(transfer_id, reason)

        transfers = TransferServer(
            model.storage,
            self._config.block_size,
            identity,
            LeaseTable(self._config.lease_s),
            on_release,
            loop.time,
        )
        lender = Lender(model.pool, transfers, identity.epoch)
        puller = TransferClient(
            model.storage,
            self._config.block_size,
            identity,
            peers,
            renew_s=min(RENEW_S, self._config.lease_s * RENEW_SHARE),
            on_pulled=self._metrics.pulled,
        )
        return Parts(
            config=self._config,
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            address=await self._address(server),
            model=model,
            metrics=self._metrics,
            compute=compute,
            redis=redis,
            transfers=transfers,
            puller=puller,
            peers=peers,
            lender=lender,
            fetcher=PrefixFetcher(puller, peers, self._config.block_size, identity.epoch),
        )

    async def _address(self, server: RpcServer) -> str:
        """Return where others reach this worker."""
        peer = urlsplit(self._config.redis).hostname or ""
        return self._config.advertise or await asyncio.to_thread(reachable, server.address, peer)

    async def _serve(self, server: RpcServer, parts: Parts) -> None:
        self._engine: Engine = create_engine(self._role, parts)
        control = Control(parts, self._role, self._engine, lambda: self._state, self.stop)
        served = parts.transfers.handlers().merged(parts.lender.handlers()).merged(self._engine.handlers())
        server.mount(served.merged(control.handlers()))
        heartbeat = Heartbeat(parts, self._role, self._engine, lambda: self._state)
        self._metrics.show(heartbeat.record)
        publisher = IndexPublisher(parts.redis, parts.worker_id, parts.epoch, parts.model.pool)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(publisher.run()),
                group.create_task(self._engine.run()),
                group.create_task(parts.transfers.run()),
                group.create_task(parts.puller.run()),
            ]
            self._state = WorkerState.READY
            await heartbeat.beat()
            tasks.append(group.create_task(heartbeat.run()))
            self.ready.set()
            log.info("ready on %s, epoch %d", parts.address, parts.epoch)
            await self._stop.wait()
            await self._drain(heartbeat, parts)
            for task in tasks:
                task.cancel()
        await publisher.withdraw()
        await heartbeat.withdraw()

    async def _drain(self, heartbeat: Heartbeat, parts: Parts) -> None:
        self._state = WorkerState.DRAINING
        log.info("draining for up to %g s", self._config.drain_seconds)
        await heartbeat.beat()
        try:
            async with asyncio.timeout(self._config.drain_seconds):
                await self._engine.drain()
                await parts.lender.wait_returned()
                await parts.puller.wait_told()
        except TimeoutError:
            log.warning("work was left after %g s of draining", self._config.drain_seconds)


async def run_worker(config: WorkerConfig, role: Role) -> None:
    """Run a worker until SIGTERM or SIGINT."""
    configure(config.name_for(role), config.log_level, config.log_format)
    host = Host(config, role)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop)
    await host.run()

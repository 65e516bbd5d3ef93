"""A worker process: loads the model, lives one life after the other on it, and shuts down in order.

Life of the process: bind the port, load the model, run one role's engine; told to take the other role, end that life in
order and begin another on the same weights and cached blocks, under a new epoch; on SIGTERM or SIGINT end in order.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from urllib.parse import urlsplit

from redis.asyncio import Redis

from common.addresses import reachable
from common.ids import WorkerId
from common.logs import configure
from common.messages import Role, SlotCounts, WorkerState
from common.redis_client import connect
from common.rpc import Handlers, RpcServer
from common.tls import load_tls
from kvstore.host.compute_thread import ComputeThread
from kvstore.host.config import WorkerConfig
from kvstore.host.control import Fence
from kvstore.host.life import Life, Standing
from kvstore.host.metrics import HostMetrics
from kvstore.host.parts import ModelParts, Parts, load_model_parts
from kvstore.host.role_file import RoleFile
from kvstore.host.watch import WatchServer
from kvstore.peers import PeerSet
from kvstore.pull_meter import PullMeter

log = logging.getLogger(__name__)

Load = Callable[[WorkerConfig], ModelParts]
"""Makes what a worker computes with; called on the compute thread."""

RPC_GRACE_S = 0.5
"""Calls that still run when everything else has ended get this long."""


class Host:
    """One worker process. Owns what outlasts its lives, and the life that it leads; begins in ``role``."""

    def __init__(self, config: WorkerConfig, role: Role, load: Load = load_model_parts) -> None:
        self._config = config
        self._load_model = load
        self._worker_id = WorkerId(config.name_for(role))
        self._role_file = RoleFile(config.role_dir, self._worker_id)
        self._first_role = self._role_file.read(otherwise=role)
        self._stopping = False
        self._life: Life | None = None
        self.ready = asyncio.Event()
        """Set once the worker takes work and the registry has been told."""
        self.metrics_port = 0
        """Where /metrics is served; 0 when nowhere."""
        self._metrics = HostMetrics()

    @property
    def parts(self) -> Parts | None:
        """What the present life runs on; None until the model is loaded."""
        return None if self._life is None else self._life.parts

    def stop(self) -> None:
        """Ask for an orderly shutdown; returns at once."""
        self._stopping = True
        if self._life is not None:
            self._life.stop()

    def _unready(self) -> str:
        return WorkerState.STARTING if self._life is None else self._life.unready()

    def counters(self) -> dict[str, int]:
        """Return the counts of the present life's engine."""
        assert self._life is not None
        return self._life.engine.counters()

    def slots(self) -> SlotCounts:
        """Return how well the held blocks are filled."""
        assert self._life is not None
        return self._life.engine.slots()

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
            await self._live(server, await self._load(server, redis, peers, compute))
        finally:
            watch.stop()
            await server.stop(RPC_GRACE_S)
            await peers.close()
            await redis.aclose()
            compute.close()
        log.info("stopped")

    async def _load(self, server: RpcServer, redis: Redis, peers: PeerSet, compute: ComputeThread) -> Standing:
        return Standing(
            config=self._config,
            worker_id=self._worker_id,
            address=await self._address(server),
            model=await compute.call(lambda: self._load_model(self._config)),
            metrics=self._metrics,
            compute=compute,
            redis=redis,
            peers=peers,
            pull_meter=PullMeter(),
            fence=Fence(),
        )

    async def _address(self, server: RpcServer) -> str:
        """Return where others reach this worker."""
        peer = urlsplit(self._config.redis).hostname or ""
        return self._config.advertise or await asyncio.to_thread(reachable, server.address, peer)

    async def _live(self, server: RpcServer, standing: Standing) -> None:
        role: Role | None = self._first_role
        rate = 0.0
        while role is not None and not self._stopping:
            standing.compute.set_nice(self._config.compute_nice(role, standing.model.spec.device.type))
            life = self._life = Life(standing, role, rate, remember=self._role_file.write)
            await life.run(server, self.ready)
            rate = life.engine.load(asyncio.get_running_loop().time()).tokens_per_s
            role = life.next_role


async def run_worker(config: WorkerConfig, role: Role, load: Load = load_model_parts) -> None:
    """Run a worker until SIGTERM or SIGINT; it begins in ``role``, or in the one that it took last."""
    configure(config.name_for(role), config.log_level, config.log_format)
    host = Host(config, role, load)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, host.stop)
    await host.run()

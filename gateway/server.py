"""A gateway's life: bind the port, load the tokenizer, follow the cluster, serve, and shut down in order.

Shutdown: refuse new work, let running answers end within ``drain_seconds``, tell what is left that it is over, stop
following the cluster.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector, disable_created_metrics
from redis.asyncio import Redis

from common.addresses import is_loopback
from common.errors import ConfigError, Unavailable
from common.redis_client import connect
from common.tls import load_tls
from gateway.admission import Admission
from gateway.app import build_app
from gateway.config import GatewayConfig
from gateway.dashboard.sampler import Sampler
from gateway.http.keys import Keys
from gateway.http.protocol import HttpProtocol
from gateway.parts import Parts, baton_version
from gateway.pin_keeper import PinKeeper
from gateway.pinned_file import read_pinned
from gateway.planner.changer import RatioChanger
from gateway.planner.metrics import PlannerMetrics
from gateway.planner.runner import PlannerRunner
from gateway.request.flow import FlowServices
from gateway.request.generation import Running
from gateway.router import RouterLimits
from gateway.telemetry.cache_ledger import CacheLedger
from gateway.telemetry.cache_metrics import CacheMetrics
from gateway.telemetry.metric_aliases import MetricAliases
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prefix_ledger import PrefixLedger
from gateway.telemetry.worker_metrics import WorkerMetrics
from gateway.text.grammar_checker import GrammarChecker
from gateway.text.message_forms import MessageForms
from gateway.text.model_files import read_model_files
from gateway.text.tokenizer import Tokenizer
from gateway.workers.cluster import Cluster
from gateway.workers.locator import Locator
from kvstore.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

CUT_MARGIN_S = 1.0
"""Connections get this long, after their answers were ended, to send what is left."""

KEEP_ALIVE_S = 75
"""An idle connection is kept this long."""


class GatewayServer:
    """One gateway. Owns its socket from construction on; raises ConfigError when the port is taken."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._pinned = read_pinned(config.pin_prefix)
        self._socket = _bind(config.host, config.port)
        self.port: int = self._socket.getsockname()[1]
        self._stop = asyncio.Event()

    @property
    def url(self) -> str:
        """Where clients connect to."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self.port}"

    def stop(self) -> None:
        """Ask for an orderly shutdown; returns at once."""
        self._stop.set()

    async def run(self) -> None:
        """Serve until :meth:`stop`; raises ConfigError when the model's files cannot be used."""
        config = self._config
        try:
            async with connect(config.redis) as redis:
                files = await asyncio.to_thread(read_model_files, config.model)
                tokenizer = await asyncio.to_thread(Tokenizer, files)
                _write_port(config.port_file, self.port)
                parts = _make_parts(config, redis, tokenizer)
                await self._serve(parts)
                tokenizer.close()
                parts.grammars.close()
        finally:
            self._socket.close()
        log.info("stopped")

    async def _serve(self, parts: Parts) -> None:
        server = _Uvicorn(_uvicorn_config(parts))
        async with asyncio.TaskGroup() as group:
            following = group.create_task(parts.services.cluster.run())
            pinning = group.create_task(self._pin_keeper(parts).run())
            sampling = group.create_task(parts.sampler.run())
            planning = group.create_task(parts.planner.run())
            serving = group.create_task(server.serve(sockets=[self._socket]))
            log.info("serving %s on %s", self._config.model_name, self.url)
            await self._stop.wait()
            parts.admission.is_draining = True
            parts.sampler.close()
            server.should_exit = True
            await self._drain(parts, serving)
            sampling.cancel()
            planning.cancel()
            pinning.cancel()
            following.cancel()

    def _pin_keeper(self, parts: Parts) -> PinKeeper:
        return PinKeeper(self._pinned, parts.keys.salts(), parts.services, parts.tokenizer)

    async def _drain(self, parts: Parts, serving: asyncio.Task[None]) -> None:
        log.info("draining for up to %g s", self._config.drain_seconds)
        try:
            async with asyncio.timeout(self._config.drain_seconds):
                await asyncio.shield(serving)
        except TimeoutError:
            log.warning("answers were left after %g s of draining", self._config.drain_seconds)
            parts.running.end_all(Unavailable("the gateway is shutting down", retry_after_s=1.0))
            await serving


class _Uvicorn(uvicorn.Server):
    """Leaves signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _uvicorn_config(parts: Parts) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(parts),
        loop="none",
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(parts.config.drain_seconds + CUT_MARGIN_S),
    )


def _make_parts(config: GatewayConfig, redis: Redis, tokenizer: Tokenizer) -> Parts:
    tls = load_tls(config.tls_cert, config.tls_key, config.tls_ca)
    limits = RouterLimits(config.local_prefill_tokens, config.max_prefill_wait_s, config.max_tick_age_s)
    ledger = CacheLedger()
    cluster = Cluster(
        redis,
        model_name=config.model_name,
        token=config.cluster_token,
        limits=limits,
        on_records=ledger.observe,
        tls=tls,
    )
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody reads
    metrics = Metrics()
    derived = CollectorRegistry()
    ProcessCollector(registry=derived)
    derived.register(WorkerMetrics(cluster.view))
    derived.register(CacheMetrics(ledger))
    derived.register(MetricAliases(metrics.registry, cluster.view, config.model_name))
    changer = RatioChanger(cluster, redis)
    services = FlowServices(
        cluster=cluster,
        redis=redis,
        locator=Locator(PrefixIndex(redis), cluster.view),
        cache=ledger,
        prefixes=PrefixLedger(),
        metrics=metrics,
        accept_timeout_s=config.accept_timeout_s,
        max_migrations=config.max_migrations,
        worker_wait_s=config.worker_wait_s,
        reroute_wait_s=config.reroute_wait_s,
    )
    planner = PlannerRunner(config, cluster, redis, changer, PlannerMetrics(metrics.registry))
    admission = Admission(config.max_requests, config.ttft_target, metrics)
    return Parts(
        config=config,
        keys=Keys(
            config.api_key,
            config.admin_key,
            is_private=is_loopback(config.host),
            share_prefixes=config.share_prefixes,
        ),
        tokenizer=tokenizer,
        message_forms=MessageForms.of(config, tokenizer.chat_template),
        grammars=GrammarChecker(tokenizer.special_tokens),
        services=services,
        metrics=metrics,
        registries=(metrics.registry, derived),
        admission=admission,
        running=Running(),
        changer=changer,
        planner=planner,
        sampler=Sampler(
            services,
            admission,
            planner,
            model=config.model_name,
            version=baton_version(),
            first_words=tokenizer.first_words,
        ),
        started_at=time.time_ns() // 1_000_000_000,
    )


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {os.strerror(error.errno or 0)}") from error
    listener.setblocking(False)
    return listener


def _write_port(path: Path | None, port: int) -> None:
    """Write the port so that a reader sees nothing or all of it; raises ConfigError."""
    if path is None:
        return
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(f"{port}\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"--port-file {path} cannot be written: {error.strerror}") from error

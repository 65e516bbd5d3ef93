"""A small cluster of real processes, tiny model, with a fault proxy in front of every worker and of Redis.

Two gateways, two prefill workers, two decode workers, one Redis. Whatever dies is started again at once.
"""

import asyncio
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from redis.asyncio import Redis
from redis.exceptions import RedisError

from common.cli import to_argv
from common.messages import Role
from compose.embedded_redis import ValkeyAddress, server_program
from compose.ports import free_port
from gateway.config import GatewayConfig
from kvstore.host.config import WorkerConfig
from tests.chaos.process import Process
from tests.chaos.proxy import FaultProxy

TOKEN = "chaos-cluster-token"
ADMIN = "chaos-admin-key"
KV_BLOCKS = 900
NUM_KEYS = 100
LEASE_S = 3.0
READY_S = 90.0
IDLE_S = 40.0
"""After whatever happened, everything is held by nobody within this time."""


@dataclass(slots=True, eq=False)
class Node:
    """One process, the way to it, and how it is called."""

    name: str
    process: Process
    proxy: FaultProxy | None
    port: int


@dataclass(slots=True)
class Answer:
    """What a client got."""

    status: int
    token_ids: list[int] = field(default_factory=list)
    error: str | None = None
    """What an error answer or event said, or why the connection to the gateway broke."""
    finish: str | None = None
    num_done: int = 0
    retry_after_s: int | None = None


@dataclass(slots=True)
class ChaosCluster:
    """All nodes by name: ``redis``, ``prefill-0`` …, ``decode-0`` …, ``gateway-0`` …."""

    nodes: dict[str, Node]
    redis: Redis
    client: httpx2.AsyncClient

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a node."""
        self.nodes[name].process.send(number)

    def terminate(self, name: str) -> None:
        """Ask a node to end."""
        self.send(name, signal.SIGTERM)

    def heal(self) -> None:
        """Let everything run and pass."""
        for node in self.nodes.values():
            node.process.send(signal.SIGCONT)
            if node.proxy is not None:
                node.proxy.heal()

    @property
    def num_restarts(self) -> int:
        """Processes that were started again."""
        return sum(node.process.num_starts - 1 for node in self.nodes.values())

    # ---- asking ----

    async def complete(self, gateway: str, body: dict[str, Any], *, key: str, leave_after: int | None = None) -> Answer:
        """Ask for a completion, streamed or not as ``body`` says; never raises for what the cluster did."""
        url = f"http://127.0.0.1:{self.nodes[gateway].port}/v1/completions"
        headers = {"Authorization": f"Bearer {key}"}
        answer = Answer(0)
        try:
            if body.get("stream"):
                await self._stream(url, body, headers, answer, leave_after)
            else:
                reply = await self.client.post(url, json=body, headers=headers)
                _take_head(answer, reply)
                _take_whole(answer, reply.json())
        except httpx2.HTTPError as error:
            answer.error = f"connection: {type(error).__name__}"
        return answer

    async def _stream(
        self, url: str, body: dict[str, Any], headers: dict[str, str], answer: Answer, leave_after: int | None
    ) -> None:
        async with self.client.stream("POST", url, json=body, headers=headers) as reply:
            _take_head(answer, reply)
            if reply.status_code != 200:
                await reply.aread()
                _take_whole(answer, reply.json())
                return
            async for event in _events(reply):
                if event == b"[DONE]":
                    answer.num_done += 1
                else:
                    _take_event(answer, event)
                if leave_after is not None and len(answer.token_ids) >= leave_after:
                    return

    async def debug(self, gateway: str = "gateway-0") -> dict[str, Any]:
        """Return ``GET /debug/kv``."""
        url = f"http://127.0.0.1:{self.nodes[gateway].port}/debug/kv"
        reply = await self.client.get(url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=10.0)
        found: dict[str, Any] = reply.raise_for_status().json()
        return found

    async def stages(self) -> dict[str, list[str]]:
        """Return the stages of the sequences on each worker."""
        report = await self.debug()
        return {
            worker["worker"]: [sequence["stage"] for sequence in (worker["report"] or {"sequences": []})["sequences"]]
            for worker in report["workers"]
        }

    # ---- waiting ----

    async def wait_restarted(self, name: str, num_starts: int) -> None:
        """Wait until a node has been started more often than ``num_starts`` times, and the cluster is whole again."""
        async with asyncio.timeout(READY_S):
            while self.nodes[name].process.num_starts <= num_starts:  # noqa: ASYNC110 - another process ends
                await asyncio.sleep(0.05)
        await self.wait_ready()

    async def wait_ready(self) -> None:
        """Wait until every gateway knows every worker, ready and connected, and Redis."""
        async with asyncio.timeout(READY_S):
            for name in self._names("gateway"):
                while not await self._is_whole(name):  # noqa: ASYNC110 - other processes change
                    await asyncio.sleep(0.1)

    async def wait_idle(self) -> None:
        """Wait until no process holds anything; fails with what is held, or when books do not balance."""
        held: list[str] = ["nothing was seen"]
        try:
            async with asyncio.timeout(IDLE_S):
                while held:
                    held = await self._held()
                    await asyncio.sleep(0.1 if held else 0)
        except TimeoutError:
            raise AssertionError(f"still held after {IDLE_S:g} s: {held}") from None

    async def _held(self) -> list[str]:
        held: list[str] = []
        for gateway in self._names("gateway"):
            try:
                report = await self.debug(gateway)
            except httpx2.HTTPError as error:
                return [f"{gateway}: {type(error).__name__}"]
            if report["gateway"]["requests_in_flight"]:
                held.append(f"{gateway}: {report['gateway']}")
            for worker in report["workers"]:
                found = worker["report"]
                if found is None:
                    held.append(f"{worker['worker']}: {worker['error']}")
                    continue
                assert not found["integrity"], found
                if found["blocks"]["held"] or found["leases"] or found["quarantined"] or found["sequences"]:
                    held.append(f"{worker['worker']}: {found}")
                if found["num_awaited"]:
                    held.append(f"{worker['worker']}: awaits {found['num_awaited']}")
        return held

    async def _is_whole(self, gateway: str) -> bool:
        try:
            reply = await self.client.get(
                f"http://127.0.0.1:{self.nodes[gateway].port}/v1/cluster",
                headers={"Authorization": f"Bearer {key_of(0)}"},
                timeout=5.0,
            )
        except httpx2.HTTPError:
            return False
        view = reply.json()
        ready = [worker for worker in view["workers"] if worker["state"] == "ready" and worker["connected"]]
        stuck = [worker for worker in ready if worker["tick_age_s"] > 1]
        return len(ready) == len(self._names("prefill", "decode")) and not stuck and view["redis"] == "up"

    def _names(self, *kinds: str) -> list[str]:
        return [name for name in self.nodes if name.rpartition("-")[0] in kinds]


def key_of(number: int) -> str:
    """Return an API key; each has a prefix cache of its own, so that the same prompts are cold again."""
    return f"chaos-key-{number}"


_next_key = itertools.count()


def new_key() -> str:
    """Return an API key that was not used yet, in turn."""
    return key_of(next(_next_key) % NUM_KEYS)


def _take_head(answer: Answer, reply: httpx2.Response) -> None:
    answer.status = reply.status_code
    if "retry-after" in reply.headers:
        answer.retry_after_s = int(reply.headers["retry-after"])


def _take_whole(answer: Answer, said: dict[str, Any]) -> None:
    if "error" in said:
        answer.error = said["error"]["message"]
        return
    (choice,) = said["choices"]
    answer.token_ids = choice["token_ids"]
    answer.finish = choice["finish_reason"]
    answer.num_done = 1


async def _events(reply: httpx2.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for part in reply.aiter_bytes():
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: "):
                yield event.removeprefix(b"data: ")


def _take_event(answer: Answer, data: bytes) -> None:
    event = json.loads(data)
    if "error" in event:
        answer.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        answer.token_ids += choice.get("token_ids") or []
        answer.finish = choice["finish_reason"] or answer.finish


@asynccontextmanager
async def chaos_cluster(model: Path, folder: Path, **gateway: Any) -> AsyncIterator[ChaosCluster]:
    """Start the cluster and wait until it is whole; ends every process."""
    env = dict(os.environ) | {"BATON_CLUSTER_TOKEN": TOKEN, "BATON_ADMIN_KEY": ADMIN, "OMP_NUM_THREADS": "1"}
    redis_port = free_port("127.0.0.1")
    redis_proxy = FaultProxy(redis_port)
    await redis_proxy.start()
    address = ValkeyAddress(redis_port, "chaos-password")
    url = ValkeyAddress(redis_proxy.port, address.password).url
    nodes = {"redis": Node("redis", _redis(address, env, folder), redis_proxy, redis_port)}
    for role in (Role.PREFILL, Role.DECODE):
        for index in range(2):
            nodes[f"{role}-{index}"] = await _worker(role, index, model, url, env, folder)
    keys = tuple(key_of(number) for number in range(NUM_KEYS))
    for index in range(2):
        nodes[f"gateway-{index}"] = _gateway(index, model, url, keys, env, folder, gateway)
    limits = httpx2.Limits(max_connections=400, max_keepalive_connections=0)
    async with (
        Redis.from_url(address.url) as redis,
        httpx2.AsyncClient(timeout=120.0, trust_env=False, limits=limits) as client,
    ):
        try:
            for node in nodes.values():
                node.process.start()
            cluster = ChaosCluster(nodes, redis, client)
            await cluster.wait_ready()
            yield cluster
        finally:
            for node in nodes.values():
                await node.process.stop()
                if node.proxy is not None:
                    await node.proxy.stop()


def _redis(address: ValkeyAddress, env: dict[str, str], folder: Path) -> Process:
    settings = f'port {address.port}\nbind 127.0.0.1\nrequirepass {address.password}\nsave ""\nappendonly no\n'
    return Process("redis", (str(server_program()), "-"), env, folder / "redis.log", stdin=settings.encode())


async def _worker(role: Role, index: int, model: Path, url: str, env: dict[str, str], folder: Path) -> Node:
    port = free_port("127.0.0.1")
    proxy = FaultProxy(port)
    await proxy.start()
    config = WorkerConfig(
        model=str(model),
        served_model_name="tiny",
        worker_id=f"{role}-{index}",
        port=port,
        advertise=f"127.0.0.1:{proxy.port}",
        redis=url,
        kv_blocks=KV_BLOCKS,
        threads=1,
        token_budget=32,
        local_chunk_tokens=32,
        max_num_seqs=1 if role is Role.PREFILL else 32,
        lease_s=LEASE_S,
        drain_seconds=2.0,
        async_scheduling="on" if index else "off",  # one decode worker of each kind
    )
    name = config.worker_id
    argv = (sys.executable, "-P", "-m", f"{role}_worker", *to_argv(config))
    return Node(name, Process(name, argv, env, folder / f"{name}.log"), proxy, port)


def _gateway(
    index: int,
    model: Path,
    url: str,
    keys: Sequence[str],
    env: dict[str, str],
    folder: Path,
    options: dict[str, Any],
) -> Node:
    port, name = free_port("127.0.0.1"), f"gateway-{index}"
    config = GatewayConfig(
        **{
            "model": str(model),
            "served_model_name": "tiny",
            "port": port,
            "redis": url,
            "api_key": tuple(keys),
            "local_prefill_tokens": 32,
            "drain_seconds": 5.0,
            "request_timeout_s": 60.0,
        }
        | options
    )
    argv = (sys.executable, "-P", "-m", "gateway", *to_argv(config))
    return Node(name, Process(name, argv, env, folder / f"{name}.log"), None, port)


async def wait_redis_up(redis: Redis) -> None:
    """Wait until Redis itself answers."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                await redis.ping()
            except (RedisError, OSError):
                await asyncio.sleep(0.05)
            else:
                return

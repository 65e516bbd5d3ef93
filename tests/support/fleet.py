"""Several prefill and decode workers in this process, any of which can be paired for a request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from common.messages import PeerPrefix, Role
from common.rpc import RpcClient
from common.services import SESSION
from kvstore.host.config import WorkerConfig
from kvstore.host.host import Host
from tests.support.split import TOKEN, Split, started


class Fleet:
    """``prefills`` and ``decodes`` are the hosts; :meth:`pair` drives one of each."""

    def __init__(self, prefills: list[Host], decodes: list[Host], pairs: dict[tuple[int, int], Split]) -> None:
        self.prefills = prefills
        self.decodes = decodes
        self._pairs = pairs

    def pair(self, prefill: int, decode: int) -> Split:
        """Return the driver of these two."""
        return self._pairs[prefill, decode]

    def computed(self) -> int:
        """Return the prompt tokens that all workers have computed."""
        return sum(host.counters()["prompt_tokens_computed"] for host in (*self.prefills, *self.decodes))


def held_by(host: Host, role: Role, num_tokens: int) -> PeerPrefix:
    """Return the hint that ``host`` holds the first ``num_tokens``."""
    assert host.parts is not None
    return PeerPrefix(host.parts.worker_id, host.parts.epoch, role, host.parts.address, num_tokens)


@asynccontextmanager
async def fleet(model: str, redis_url: str, *, prefills: int, decodes: int, **options: Any) -> AsyncIterator[Fleet]:
    """Run so many workers on ``model`` with small chunks; at the end no block may be held."""
    defaults = {"kv_blocks": 256, "token_budget": 48, "local_chunk_tokens": 16, "threads": 1, "drain_seconds": 5.0}
    config: dict[str, Any] = {"model": model, "redis": redis_url, "cluster_token": TOKEN} | defaults | options
    hosts = {
        role: [Host(WorkerConfig(worker_id=f"{role}-{number}", **config), role) for number in range(count)]
        for role, count in ((Role.PREFILL, prefills), (Role.DECODE, decodes))
    }
    clients: list[RpcClient] = []
    async with Redis.from_url(redis_url) as redis, asyncio.TaskGroup() as group:
        for host in (*hosts[Role.PREFILL], *hosts[Role.DECODE]):
            await started(host, group)
        pairs: dict[tuple[int, int], Split] = {}
        dispatchers = []
        for p, prefill in enumerate(hosts[Role.PREFILL]):
            for d, decode in enumerate(hosts[Role.DECODE]):
                assert decode.parts is not None
                clients.append(RpcClient(decode.parts.address, TOKEN))
                pairs[p, d] = Split(prefill, decode, redis, clients[-1].open(SESSION))
                dispatchers.append(group.create_task(pairs[p, d].dispatch()))
        try:
            yield Fleet(hosts[Role.PREFILL], hosts[Role.DECODE], pairs)
            for pair in pairs.values():
                await pair.wait_idle()
        finally:
            for dispatcher in dispatchers:
                dispatcher.cancel()
            for host in (*hosts[Role.DECODE], *hosts[Role.PREFILL]):
                host.stop()
            for client in clients:
                await client.close()

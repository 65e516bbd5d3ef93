"""The embedded server as ``baton up`` runs it."""

import asyncio
import os
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import AuthenticationError

from common.redis_client import connect
from compose.embedded_redis import new_address, valkey_spec, wait_redis
from compose.ports import free_port
from compose.supervisor import Supervisor

pytestmark = pytest.mark.anyio


async def test_it_answers_with_its_password_only_keeps_nothing_and_evicts_nothing(tmp_path: Path) -> None:
    address = new_address(free_port("127.0.0.1"))
    spec = valkey_spec(address, dict(os.environ))
    assert address.password not in " ".join(spec.argv)
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(tmp_path, group)
        keeper = supervisor.start(spec)
        async with asyncio.timeout(30):
            await wait_redis(address.url)
        async with connect(address.url) as client:
            assert await client.config_get("maxmemory-policy", "save", "appendonly", "bind") == {
                "maxmemory-policy": "noeviction",
                "save": "",
                "appendonly": "no",
                "bind": "127.0.0.1",
            }
        async with Redis(host="127.0.0.1", port=address.port, retry=None) as stranger:
            with pytest.raises(AuthenticationError):
                await stranger.ping()
        await supervisor.stop([keeper])
    assert os.listdir(tmp_path) == ["valkey.log"]

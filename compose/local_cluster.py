"""A cluster on this machine: what is started in which order, when it counts as ready, and how it ends."""

import asyncio
import os
import secrets

from common.errors import Unavailable
from compose.console import note, result
from compose.embedded_redis import new_address, valkey_spec, wait_redis
from compose.first_of import first_of
from compose.keeper import Keeper
from compose.model_tool import fetch_model
from compose.passed_on import PassedOn
from compose.plan import Plan, Site, base_env, client_model_name, forget_roles, plan_cluster
from compose.ports import free_port
from compose.readiness import wait_ready
from compose.supervisor import Supervisor
from compose.up_config import UpConfig

_REDIS_WAIT_S = 20.0
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class LocalCluster:
    """Knows which of the supervisor's children is what. Lives from :meth:`run` to :meth:`stop`."""

    def __init__(self, config: UpConfig, passed: PassedOn, port: int, supervisor: Supervisor) -> None:
        self._config = config
        self._passed = passed
        self._port = port
        self._supervisor = supervisor
        self._env = base_env(os.environ)
        self._redis: list[Keeper] = []
        self._gateway: list[Keeper] = []
        self._workers: list[Keeper] = []

    async def run(self) -> None:
        """Start everything, say when it is ready, and keep it running; raises BatonError when it cannot be started."""
        model_dir = await fetch_model(self._config.model, self._env)
        redis_url = await self._start_redis()
        name = client_model_name(self._config.model, model_dir)
        site = Site(model_dir, name, self._port, redis_url, secrets.token_hex(16), self._supervisor.log_dir)
        forget_roles(site)
        self._start(plan_cluster(self._config, self._passed, site, os.environ))
        await first_of(wait_ready(self._url(reachable=True), _report), self._supervisor.wait_given_up())
        self._supervisor.mark_ready()
        result(f"ready {self._url()}")
        result(_try_line(self._url(reachable=True)))
        await self._supervisor.wait_given_up()

    async def stop(self) -> None:
        """End the gateway, which lets its requests end, then the workers, then Redis."""
        await self._supervisor.stop(self._gateway, self._workers, self._redis)

    async def _start_redis(self) -> str:
        url = self._config.redis
        if not url:
            address = new_address(free_port("127.0.0.1"))
            self._redis.append(self._supervisor.start(valkey_spec(address, self._env)))
            url = address.url
        await first_of(_wait_redis(url), self._supervisor.wait_given_up())
        return url

    def _start(self, plan: Plan) -> None:
        self._gateway.append(self._supervisor.start(plan.gateway))
        self._workers += [self._supervisor.start(spec) for spec in plan.workers]
        names = ", ".join(spec.name for spec in (plan.gateway, *plan.workers))
        note(f"starting {names}; logs in {self._supervisor.log_dir}")

    def _url(self, *, reachable: bool = False) -> str:
        host = _LOOPBACK.get(self._config.host, self._config.host) if reachable else self._config.host
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"


async def _wait_redis(url: str) -> None:
    try:
        async with asyncio.timeout(_REDIS_WAIT_S):
            await wait_redis(url)
    except TimeoutError as error:
        raise Unavailable(f"Redis has not answered for {_REDIS_WAIT_S:g} s; check --redis") from error


def _report(missing: str) -> None:
    note(f"not ready yet: {missing}")


def _try_line(url: str) -> str:
    message = '{"role": "user", "content": "What is the capital of France?"}'
    body = f'{{"messages": [{message}], "temperature": 0, "stream": true}}'
    return f"try: curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'"

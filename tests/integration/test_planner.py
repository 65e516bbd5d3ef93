"""One gateway plans for all: the right to change roles, its number, and what the other gateways follow."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from prometheus_client import CollectorRegistry
from redis.asyncio import Redis

from common.messages import BlockCounts, PlannerStep, Role, WorkerLoad, WorkerRecord
from common.redis_client import connect
from common.registry import publish
from gateway.config import GatewayConfig
from gateway.planner.board import STATE_KEY
from gateway.planner.changer import RatioChanger
from gateway.planner.metrics import PlannerMetrics
from gateway.planner.right import RoleRight
from gateway.planner.runner import PlannerRunner
from gateway.router import RouterLimits
from gateway.workers.cluster import Cluster
from tests.support.stub_decode import MODEL, TOKEN, StubDecode, record

pytestmark = pytest.mark.anyio

LIMITS = RouterLimits(local_prefill_tokens=64, max_prefill_wait_s=10.0, max_tick_age_s=50.0)


async def test_the_right_has_one_holder_and_its_number_only_rises(redis: Redis) -> None:
    first, second = RoleRight(redis, is_planner=True), RoleRight(redis, is_planner=True)
    number = await first.acquire()
    assert number is not None
    assert await second.acquire() is None
    assert await first.renew()
    await first.release()
    later = await second.acquire()
    assert later is not None
    assert later > number
    assert not await first.renew()
    await redis.flushall()
    assert not await second.renew()
    last = await first.acquire()
    assert last is not None
    assert last > later


async def test_an_operator_takes_the_right_from_a_planner_but_not_from_an_operator(redis: Redis) -> None:
    planner, operator = RoleRight(redis, is_planner=True), RoleRight(redis, is_planner=False)
    number = await planner.acquire()
    taken = await operator.acquire()
    assert number is not None
    assert taken is not None
    assert taken > number
    assert not await planner.renew()
    assert await planner.acquire() is None
    assert await RoleRight(redis, is_planner=False).acquire() is None
    await planner.release()  # is not the holder any more: nothing happens
    assert await operator.renew()


class Gateway:
    """A gateway's view of the cluster and its planner, without the rest."""

    def __init__(self, redis: Redis, mode: str) -> None:
        config = GatewayConfig("model", planner=mode, local_prefill_tokens=64)  # type: ignore[arg-type]
        self.registry = CollectorRegistry()
        self.cluster = Cluster(redis, model_name=MODEL, token=TOKEN, limits=LIMITS)
        changer = RatioChanger(self.cluster, redis)
        self.runner = PlannerRunner(config, self.cluster, redis, changer, PlannerMetrics(self.registry))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.cluster.run())
            group.create_task(self.runner.run())

    def steps(self) -> Sequence[PlannerStep]:
        return () if self.runner.state is None else self.runner.state.steps

    @property
    def plans(self) -> bool:
        return self.registry.get_sample_value("baton_planner_leader") == 1


@asynccontextmanager
async def running(gateway: Gateway) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(gateway.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - other tasks work
            await asyncio.sleep(0.02)


def workers(**prefill_load: float) -> list[WorkerRecord]:
    """Two prefill workers under pressure."""
    fields = {"running": 1, "waiting": 9, "queued_tokens": 40_000, "tokens_per_s": 1000.0, "tick_age_s": 0.0}
    hot = WorkerLoad(**(fields | prefill_load))  # type: ignore[arg-type]
    blocks = BlockCounts(100, 90, 0, 10, 0)
    return [record(f"p{n}", Role.PREFILL, load=hot, blocks=blocks) for n in range(2)]


@asynccontextmanager
async def beating(redis: Redis, records: list[WorkerRecord]) -> AsyncIterator[None]:
    """Keep these records fresh beside an idle decode worker."""

    async def beat() -> None:
        while True:
            for one in records:
                await publish(redis, one)
            await asyncio.sleep(0.3)

    task = asyncio.create_task(beat())
    decode = StubDecode(redis, lambda submit: [])
    await decode.start()
    try:
        yield
    finally:
        await decode.stop()
        task.cancel()
        await asyncio.wait((task,))


async def test_one_gateway_plans_and_when_it_goes_another_does(redis_url: str) -> None:
    async with connect(redis_url) as redis, beating(redis, workers(queued_tokens=0)):
        first, second = Gateway(redis, "auto"), Gateway(redis, "auto")
        async with running(second):
            async with running(first):
                await until(lambda: first.plans or second.plans)
                leader, other = (first, second) if first.plans else (second, first)
                await until(lambda: other.runner.state is not None)
                assert not other.plans
            if leader is first:
                await until(lambda: second.plans)


async def test_advice_is_given_and_nothing_is_done(redis_url: str) -> None:
    async with connect(redis_url) as redis, beating(redis, workers()):
        gateway = Gateway(redis, "advise")
        async with running(gateway):
            await until(lambda: any(step.outcome == "advised" for step in gateway.steps()))
            assert gateway.cluster.limits.local_prefill_tokens == 64


async def test_a_threshold_that_one_gateway_moved_holds_at_the_other_until_nobody_plans(redis_url: str) -> None:
    async with connect(redis_url) as redis, beating(redis, workers()):
        first, second = Gateway(redis, "auto"), Gateway(redis, "auto")
        async with running(first), running(second):
            for gateway in (first, second):
                await until(lambda one=gateway: one.cluster.limits.local_prefill_tokens == 1024)  # type: ignore[misc]
            assert await RoleRight(redis, is_planner=False).acquire() is not None
            await until(lambda: not first.plans and not second.plans)
            await redis.delete(STATE_KEY)  # as it is after its time to live
            for gateway in (first, second):
                await until(lambda one=gateway: one.cluster.limits.local_prefill_tokens == 64)  # type: ignore[misc]


async def test_without_metrics_it_holds_and_says_which_are_missing(redis_url: str) -> None:
    async with connect(redis_url) as redis, beating(redis, workers(tokens_per_s=0.0)):
        gateway = Gateway(redis, "auto")
        async with running(gateway):
            await until(lambda: any(step.reason == "missing_metrics" for step in gateway.steps()))
            assert gateway.runner.pressure().missing == "rate of the prefill workers"
            assert gateway.cluster.limits.local_prefill_tokens == 64

"""Carries out changes of role: orders them, one worker at a time, and waits until each has taken its new one."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from common.errors import DeadlineExceeded, InvalidRequest, StaleEpoch, Unavailable
from common.ids import WorkerId
from common.messages import Role, TakeRole, WorkerState
from common.redis_client import RedisUnavailable
from common.services import TAKE_ROLE
from gateway.errors import Conflict
from gateway.planner.board import PlannerBoard
from gateway.planner.ratio import Ratio, choose_donor, is_settled, live, ratio_of
from gateway.planner.right import TTL_S, RoleRight
from gateway.router import WorkerView
from gateway.workers.cluster import Cluster

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
MARGIN_S = 30.0
"""A worker that was told to take a role has this long, beyond what its running work gets, until it is ready in it."""


@dataclass(frozen=True, slots=True)
class Change:
    """One worker that has taken another role."""

    worker: WorkerId
    role: Role
    seconds: float
    """From the order until this gateway could give it work in its new role."""


class RatioChanger:
    """Changes roles in one cluster. Whoever calls it has the right, or gets it here for an operator."""

    def __init__(self, cluster: Cluster, redis: Redis) -> None:
        self._cluster = cluster
        self._redis = redis

    def settled_workers(self) -> list[WorkerView]:
        """Return all workers; raises Conflict while one is on its way out or into another role."""
        workers = live(self._cluster.view())
        if not is_settled(workers):
            raise Conflict("a worker is starting, ending or changing its role; try again when all are ready")
        return workers

    async def set_ratio(self, target: Ratio, drain_s: float) -> list[Change]:
        """Bring the cluster to ``target`` for an operator, and return what was changed, in order.

        Running work of each worker gets ``drain_s`` seconds, then it moves. Raises InvalidRequest for a ratio of
        another number of workers, Conflict while another change is under way, Unavailable without Redis.
        """
        changes: list[Change] = []
        if (ratio := ratio_of(self.settled_workers())).total != target.total:
            raise InvalidRequest(f"there are {ratio.total} workers, and {target} is of {target.total}", param="ratio")
        async with self._right() as fence:
            while (ratio := ratio_of(workers := self.settled_workers())) != target:
                if ratio.total != target.total:
                    raise Conflict(f"a worker has come or gone meanwhile; the ratio is {ratio}")
                role = Role.PREFILL if ratio.prefill < target.prefill else Role.DECODE
                changes.append(await self.change_one(workers, role, fence, drain_s))
        await self._set_home(target)
        return changes

    async def _set_home(self, ratio: Ratio) -> None:
        try:
            await PlannerBoard(self._redis).set_home(ratio)
        except RedisUnavailable as error:
            log.warning("the planner was not told that %s is the ratio to return to: %s", ratio, error)

    async def change_one(self, workers: list[WorkerView], role: Role, fence: int, drain_s: float) -> Change:
        """Let the worker that is quickest to do so take ``role``; raises BatonError when it does not."""
        donor = choose_donor(workers, Role.DECODE if role is Role.PREFILL else Role.PREFILL)
        if donor is None:
            raise Unavailable("no worker can change its role now", retry_after_s=1.0)
        began = asyncio.get_running_loop().time()
        await self._order(donor, TakeRole(donor.record.epoch, role, drain_s, fence))
        await self._wait_changed(donor.worker_id, role, began + drain_s + MARGIN_S)
        change = Change(donor.worker_id, role, asyncio.get_running_loop().time() - began)
        log.info("%s is a %s worker now, after %.2f s", change.worker, role, change.seconds)
        return change

    async def _order(self, worker: WorkerView, order: TakeRole) -> None:
        log.info("%s is to become a %s worker", worker.worker_id, order.role)
        client = self._cluster.client(worker.record)
        try:
            await client.call(TAKE_ROLE, order, CALL_TIMEOUT_S)
        except StaleEpoch as error:
            raise Conflict(f"{worker.worker_id} did not take the order: {error.message}") from error
        finally:
            await client.close()

    async def _wait_changed(self, worker_id: WorkerId, role: Role, until: float) -> None:
        while not self._has_changed(worker_id, role):
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise DeadlineExceeded(f"{worker_id} has not become a {role} worker in time")
            await self._cluster.wait_changed(left_s)

    def _has_changed(self, worker_id: WorkerId, role: Role) -> bool:
        return any(
            one.worker_id == worker_id
            and one.record.role is role
            and one.record.state is WorkerState.READY
            and one.connected
            for one in self._cluster.view().workers
        )

    @asynccontextmanager
    async def _right(self) -> AsyncIterator[int]:
        """Hold an operator's right to change roles; give the number that comes with it."""
        right = RoleRight(self._redis, is_planner=False)
        try:
            fence = await right.acquire()
        except RedisUnavailable as error:
            raise Unavailable("roles cannot be changed while Redis is away", retry_after_s=1.0) from error
        if fence is None:
            raise Conflict("another change of the ratio is under way")
        keeping = asyncio.create_task(_keep(right))
        try:
            yield fence
        finally:
            keeping.cancel()
            await asyncio.wait((keeping,))
            await _release(right)


async def _keep(right: RoleRight) -> None:
    """Renew the right until cancelled. One that is lost shows in the workers' refusals."""
    while True:
        await asyncio.sleep(TTL_S / 4)
        try:
            await right.renew()
        except RedisUnavailable as error:
            log.warning("the right to change roles was not renewed: %s", error)


async def _release(right: RoleRight) -> None:
    try:
        await right.release()
    except RedisUnavailable as error:
        log.warning("the right to change roles was not given back, it will expire: %s", error)

"""What an operator may ask of a worker, by way of a gateway: to drain, to take the other role, to say what it holds."""

from collections.abc import Callable

from common.errors import StaleEpoch, Unavailable
from common.ids import Epoch
from common.messages import Ack, Drain, Inspect, KvReport, Role, TakeRole, WorkerState
from common.rpc import Handlers
from common.services import DRAIN, INSPECT, TAKE_ROLE
from kvstore.block_pool import IntegrityError
from kvstore.host.engine import Engine
from kvstore.host.parts import Parts


class Fence:
    """The highest number under which a role was ordered; lives as long as the process, over its lives.

    Whoever may change roles draws a number from Redis with that right, so an order under a lower one comes from
    somebody who has lost it.
    """

    def __init__(self) -> None:
        self._highest = 0

    def pass_through(self, number: int) -> None:
        """Let an order pass; raises StaleEpoch when one under a higher number has come before."""
        if number < self._highest:
            raise StaleEpoch("somebody else has the right to change roles by now")
        self._highest = number


class Control:
    """Answers for one life. ``stop`` begins an orderly shutdown, ``change`` an orderly change to a role; both return
    at once."""

    def __init__(
        self,
        parts: Parts,
        role: Role,
        engine: Engine,
        fence: Fence,
        *,
        state: Callable[[], WorkerState],
        stop: Callable[[], None],
        change: Callable[[Role, float], None],
    ) -> None:
        self._parts = parts
        self._role = role
        self._engine = engine
        self._fence = fence
        self._state = state
        self._stop = stop
        self._change = change

    def handlers(self) -> Handlers:
        """Return what every worker serves to operators."""
        return Handlers(
            unary={DRAIN: self._drain, TAKE_ROLE: self._take_role, INSPECT: self._inspect}, stream={}, bidi={}
        )

    async def _drain(self, drain: Drain) -> Ack:
        self._check_epoch(drain.epoch)
        self._stop()
        return Ack()

    async def _take_role(self, order: TakeRole) -> Ack:
        self._check_epoch(order.epoch)
        self._fence.pass_through(order.fence)
        if order.role is self._role:
            return Ack()
        if self._state() is not WorkerState.READY:
            raise Unavailable(f"the worker is {self._state()}")
        self._change(order.role, order.drain_s)
        return Ack()

    async def _inspect(self, inspect: Inspect) -> KvReport:
        self._check_epoch(inspect.epoch)
        return self.report()

    def report(self) -> KvReport:
        """Return what the worker holds now."""
        parts, pool = self._parts, self._parts.model.pool
        return KvReport(
            worker_id=parts.worker_id,
            role=self._role,
            epoch=parts.epoch,
            state=self._state(),
            blocks=pool.counts(),
            integrity=self._integrity(),
            sequences=tuple(self._engine.sequences()),
            leases=parts.transfers.report(),
            num_awaited=parts.puller.leases.num_awaited,
            quarantined=tuple(pool.quarantined()),
        )

    def _integrity(self) -> str:
        try:
            self._parts.model.pool.check_integrity(self._parts.holders(self._engine.tables()))
        except IntegrityError as error:
            return str(error)
        return ""

    def _check_epoch(self, epoch: Epoch) -> None:
        if epoch != self._parts.epoch:
            raise StaleEpoch("the worker has restarted since")

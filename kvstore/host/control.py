"""What an operator may ask of a worker, by way of a gateway: to drain, and to show what it holds."""

from collections.abc import Callable

from common.errors import StaleEpoch
from common.ids import Epoch
from common.messages import Ack, Drain, Inspect, KvReport, Role, WorkerState
from common.rpc import Handlers
from common.services import DRAIN, INSPECT
from kvstore.block_pool import IntegrityError
from kvstore.host.engine import Engine
from kvstore.host.parts import Parts


class Control:
    """Answers for one worker. ``stop`` begins an orderly shutdown and returns at once."""

    def __init__(
        self, parts: Parts, role: Role, engine: Engine, state: Callable[[], WorkerState], stop: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._role = role
        self._engine = engine
        self._state = state
        self._stop = stop

    def handlers(self) -> Handlers:
        """Return what every worker serves to operators."""
        return Handlers(unary={DRAIN: self._drain, INSPECT: self._inspect}, stream={}, bidi={})

    async def _drain(self, drain: Drain) -> Ack:
        self._check_epoch(drain.epoch)
        self._stop()
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

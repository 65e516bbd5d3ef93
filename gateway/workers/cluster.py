"""What this gateway knows of the workers, and its sessions with the decode workers.

The registry is polled. When Redis is away the last view stays, and the sessions say who is alive. A worker that is
gone, has begun a new life, or makes no progress is reported to whoever waits for it.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from redis.asyncio import Redis

from common.errors import Unavailable
from common.ids import Epoch, WorkerId, new_epoch
from common.messages import QUEUE_RESETS, Role, WorkerRecord, WorkerState
from common.redis_client import CALL_TIMEOUT_S, RedisUnavailable
from common.registry import members
from common.rpc import RpcClient
from common.tls import Tls
from gateway.router import ClusterView, RouterLimits, WorkerView, is_stale, is_stuck, usable
from gateway.workers.session import DecodeSession
from gateway.workers.tally import Tally

log = logging.getLogger(__name__)

POLL_S = 0.5
"""The registry is read this often."""

LOOK_AGAIN_S = 0.5
"""Who waits for a worker looks this often, whatever changes: a worker also becomes fit by time alone."""

Life = tuple[WorkerId, Epoch]
"""One life of one worker."""


class Member:
    """One life of a worker, as long as the registry knows it. Owned by the cluster."""

    def __init__(self, record: WorkerRecord, now: float, session: DecodeSession | None) -> None:
        self.record = record
        self.seen_at = now
        self.session = session
        self.task: asyncio.Task[None] | None = None
        self.sequences = Tally()
        self.tokens = Tally()
        self.left: set[Callable[[], None]] = set()
        """Whom to tell when the worker takes nothing new, is stuck, has lost its queue, or is gone."""

    @property
    def life(self) -> Life:
        """Which life of which worker this is."""
        return self.record.worker_id, self.record.epoch

    def seen(self, record: WorkerRecord, now: float) -> None:
        """Take the newest record; one that says that a queue was lost is told to whoever waits for what was in it."""
        self.seen_at = now
        if record.counters.get(QUEUE_RESETS) != self.record.counters.get(QUEUE_RESETS):
            for left in list(self.left):
                left()
        if record != self.record:
            self.record = record
            self.sequences.observed(record.load.running + record.load.waiting)
            self.tokens.observed(record.load.queued_tokens)

    def view(self) -> WorkerView:
        """Return what the router is told."""
        connected = self.session is None or self.session.is_up
        return WorkerView(self.record, self.seen_at, connected, self.sequences.total, self.tokens.total)


class Cluster:
    """Owns the members and their sessions. Runs on the event loop from :meth:`run` until cancelled."""

    def __init__(
        self,
        redis: Redis,
        *,
        model_name: str,
        token: str,
        limits: RouterLimits,
        on_records: Callable[[Sequence[WorkerRecord], float], None] | None = None,
        tls: Tls | None = None,
    ) -> None:
        self._redis = redis
        self._on_records = on_records
        self._model_name = model_name
        self._token = token
        self._tls = tls
        self.limits = limits
        self._name = WorkerId(f"gateway-{socket.gethostname()}-{os.getpid()}")
        self._epoch = new_epoch()
        self._members: dict[WorkerId, Member] = {}
        self._polled_at = 0.0
        self._redis_is_up: bool | None = None
        self._changed = asyncio.Event()
        self._foreign: set[WorkerId] = set()

    # ---- what others ask ----

    def set_local_prefill_tokens(self, num_tokens: int) -> None:
        """Let prompts with at most so many tokens that are not cached be prefilled where they are decoded."""
        self.limits = replace(self.limits, local_prefill_tokens=num_tokens)

    def client(self, record: WorkerRecord) -> RpcClient:
        """Return a new client of a worker; the caller closes it."""
        return RpcClient(record.address, self._token, self._tls)

    def view(self) -> ClusterView:
        """Return the cluster as it is known now."""
        return ClusterView(
            tuple(member.view() for member in self._members.values()), self._polled_at, bool(self._redis_is_up)
        )

    def usable(self, role: Role) -> list[WorkerView]:
        """Return the workers of ``role`` that may be given work now."""
        return usable(self.view(), role, self.limits)

    def max_model_len(self) -> int:
        """Return how many tokens prompt and answer may have together; raises Unavailable without a decode worker."""
        ready = self.usable(Role.DECODE)
        if not ready:
            raise Unavailable("no decode worker is ready", retry_after_s=1.0)
        return min(worker.record.max_model_len for worker in ready)

    async def wait_max_model_len(self, wait_s: float) -> int:
        """Return the same, waiting up to ``wait_s`` for a decode worker; raises Unavailable without one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while not self.usable(Role.DECODE):
                    await self.wait_changed(LOOK_AGAIN_S)
        return self.max_model_len()

    def session(self, worker: WorkerView) -> DecodeSession:
        """Return the session with a decode worker; raises Unavailable when this life of it is gone."""
        member = self._find(worker)
        if member is None or member.session is None:
            raise Unavailable("the decode worker is gone")
        return member.session

    @contextmanager
    def counted(self, worker: WorkerView, *, sequences: int = 0, tokens: int = 0) -> Iterator[None]:
        """Count work as given to ``worker`` while the context lasts."""
        member = self._find(worker)
        if member is None:
            yield
            return
        member.sequences.add(sequences)
        member.tokens.add(tokens)
        try:
            yield
        finally:
            member.sequences.remove(sequences)
            member.tokens.remove(tokens)

    @contextmanager
    def watched(self, worker: WorkerView, left: Callable[[], None]) -> Iterator[None]:
        """Call ``left`` while the context lasts whenever ``worker`` is found unfit for new work."""
        member = self._find(worker)
        if member is None:
            left()
            yield
            return
        member.left.add(left)
        try:
            yield
        finally:
            member.left.discard(left)

    def is_alive(self, worker: WorkerView) -> bool:
        """Whether this life of ``worker`` is known and makes progress; it may be draining."""
        member = self._find(worker)
        return member is not None and not is_stuck(member.view(), self.limits)

    async def wait_changed(self, timeout_s: float) -> None:
        """Wait until the view changes, or ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass

    # ---- life ----

    async def run(self) -> None:
        """Follow the registry and keep the sessions until cancelled."""
        async with asyncio.TaskGroup() as group:
            try:
                while True:
                    await self._poll(group)
                    await asyncio.sleep(POLL_S)
            finally:
                for member in list(self._members.values()):
                    self._remove(member)

    async def _poll(self, group: asyncio.TaskGroup) -> None:
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                records = await members(self._redis)
        except RedisUnavailable as error:
            if self._redis_is_up is not False:
                log.warning("Redis cannot be reached, serving goes on with the last view: %s", error)
            self._redis_is_up = False
        else:
            self._polled_at = asyncio.get_running_loop().time()
            if not self._redis_is_up:
                log.info("Redis answers")
                self._excuse_absence()
            self._redis_is_up = True
            self._apply([record for record in records if self._is_ours(record)], group)
        self._leave_unfit()
        self._notify()

    def _excuse_absence(self) -> None:
        """Nobody could be seen while Redis was away, so who is not in it yet has only begun to be missing."""
        for member in self._members.values():
            member.seen_at = self._polled_at

    def _is_ours(self, record: WorkerRecord) -> bool:
        if record.model == self._model_name:
            return True
        if record.worker_id not in self._foreign:
            log.warning("%s serves %s, not %s; it is left alone", record.worker_id, record.model, self._model_name)
            self._foreign.add(record.worker_id)
        return False

    def _apply(self, records: list[WorkerRecord], group: asyncio.TaskGroup) -> None:
        now = self._polled_at
        if self._on_records is not None:
            self._on_records(records, now)
        for record in records:
            member = self._members.get(record.worker_id)
            if member is not None and (member.life, member.record.role) != (
                (record.worker_id, record.epoch),
                record.role,
            ):
                self._remove(member)
                member = None
            if member is None:
                self._add(record, now, group)
            else:
                member.seen(record, now)
        view = self.view()
        for member in list(self._members.values()):
            if is_stale(view, member.view()):
                self._remove(member)

    def _add(self, record: WorkerRecord, now: float, group: asyncio.TaskGroup) -> None:
        log.info("%s worker %s at %s, epoch %d", record.role, record.worker_id, record.address, record.epoch)
        session = None
        if record.role is Role.DECODE:
            session = DecodeSession(record, self.client(record), self._name, self._epoch, self._notify)
        member = Member(record, now, session)
        member.sequences.observed(record.load.running + record.load.waiting)
        member.tokens.observed(record.load.queued_tokens)
        self._members[record.worker_id] = member
        if session is not None:
            member.task = group.create_task(session.run())

    def _remove(self, member: Member) -> None:
        log.info("%s worker %s, epoch %d, is gone", member.record.role, *member.life)
        del self._members[member.record.worker_id]
        if member.task is not None:
            member.task.cancel()
        for left in list(member.left):
            left()

    def _leave_unfit(self) -> None:
        """Move the work of stuck decode workers if another can take it; tell who waits for an unfit prefill worker."""
        fit = {worker.worker_id for worker in self.usable(Role.DECODE)}
        for member in list(self._members.values()):
            stuck = is_stuck(member.view(), self.limits)
            if member.session is not None and stuck and fit:
                member.session.leave(Unavailable("the decode worker makes no progress"))
            if stuck or member.record.state is not WorkerState.READY:
                for left in list(member.left):
                    left()

    def _find(self, worker: WorkerView) -> Member | None:
        member = self._members.get(worker.worker_id)
        return member if member is not None and member.record.epoch == worker.record.epoch else None

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

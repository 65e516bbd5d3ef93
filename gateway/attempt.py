"""One decode worker's try at a sequence: its answer to Submit, then news of the prompt, then of the end.

The start and the output go straight to the flow's callbacks; for everything else the flow waits here.
"""

import asyncio
import enum
from collections.abc import Callable

from common.errors import BatonError, from_detail
from common.ids import RequestId
from common.messages import Plan, SequenceOutput, Submit
from gateway.router import PlanChoice, WorkerView
from gateway.session import DecodeSession


class Stage(enum.IntEnum):
    """How far a sequence has come on its decode worker."""

    SUBMITTED = 0  # neither accepted nor refused
    ACCEPTED = 1  # the worker owns it
    STARTED = 2  # its prompt is being computed
    WRITING = 3  # the first token has come
    FLOWING = 4  # a further token has come: the prompt's KV is where it is needed
    ENDED = 5  # finished, refused, lost or left


class Attempt:
    """Where one sequence is on one decode worker. Is the session's sink for it; owned by one flow."""

    def __init__(
        self,
        request_id: RequestId,
        worker: WorkerView,
        session: DecodeSession,
        on_started: Callable[[int], None],
        on_output: Callable[[SequenceOutput], None],
    ) -> None:
        self.request_id = request_id
        self.worker = worker
        self.stage = Stage.SUBMITTED
        self.was_accepted = False
        self.held_tokens = 0
        """Leading tokens that the decode worker held when it accepted."""
        self.error: BatonError | None = None
        """Why it ended, when it did not finish."""
        self.choice: PlanChoice | None = None
        """The plan that holds."""
        self.prefill_left = False
        """The prefill worker of the plan takes nothing new, is stuck or gone."""
        self._session = session
        self._on_started = on_started
        self._on_output = on_output
        self._news = asyncio.Event()

    # ---- what the flow does ----

    def submit(self, submit: Submit) -> None:
        """Offer the sequence; raises Unavailable when the worker is not connected."""
        self._session.submit(submit, self)

    async def plan(self, plan: Plan) -> None:
        """Say who computes the prompt; returns when that is on its way to the worker."""
        await self._session.plan(plan)

    async def wait_for(self, stage: Stage, timeout_s: float | None) -> None:
        """Wait until ``stage`` is reached or the attempt has ended; raises TimeoutError after ``timeout_s``."""
        async with asyncio.timeout(timeout_s):
            while self.stage < stage:
                await self._wait_news()

    async def wait_for_prefill(self, stage: Stage, timeout_s: float | None) -> None:
        """As :meth:`wait_for`, but return also when the prefill worker of the plan has left."""
        async with asyncio.timeout(timeout_s):
            while self.stage < stage and not self.prefill_left:
                await self._wait_news()

    def leave(self, reason: str) -> None:
        """Give the sequence up here; does nothing when it has ended."""
        if not self.has_ended:
            self._session.abort(self.request_id, reason)
            self._reach(Stage.ENDED)

    def prefill_has_left(self) -> None:
        """Note that the prefill worker of the plan takes nothing new, is stuck or gone."""
        self.prefill_left = True
        self._news.set()

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes."""
        return self.stage is Stage.ENDED

    # ---- what the session tells ----

    def accepted(self, cached_tokens: int) -> None:
        """See :class:`gateway.session.Sink`."""
        self.was_accepted = True
        self.held_tokens = cached_tokens
        self._reach(Stage.ACCEPTED)

    def refused(self, error: BatonError) -> None:
        """See :class:`gateway.session.Sink`."""
        self.error = error
        self._reach(Stage.ENDED)

    def started(self, cached_tokens: int) -> None:
        """See :class:`gateway.session.Sink`."""
        if self.stage is Stage.ACCEPTED:
            self._on_started(cached_tokens)
            self._reach(Stage.STARTED)

    def output(self, output: SequenceOutput) -> None:
        """See :class:`gateway.session.Sink`."""
        if self.has_ended:
            return
        if output.token_ids or output.finish is not None:
            self._on_output(output)
        if self.has_ended:  # the flow has had enough
            return
        if output.error is not None:
            self.error = from_detail(output.error)
        if output.error is not None or output.finish is not None:
            self._reach(Stage.ENDED)
        else:
            self._reach(Stage.WRITING if self.stage < Stage.WRITING else Stage.FLOWING)

    def lost(self, error: BatonError) -> None:
        """See :class:`gateway.session.Sink`."""
        if not self.has_ended:
            self.error = error
            self._reach(Stage.ENDED)

    async def _wait_news(self) -> None:
        self._news.clear()
        await self._news.wait()

    def _reach(self, stage: Stage) -> None:
        if stage is not self.stage:
            self.stage = stage
            self._news.set()

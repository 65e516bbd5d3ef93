"""One decode worker's try at a prompt's samples: its answer to Submit, then news of the prompt, then of the end.

The start, the prompt's log probabilities and the output go straight to the flow's callbacks; for everything else the
flow waits here.
"""

import asyncio
import enum
from collections.abc import Callable

from common.errors import BatonError, from_detail
from common.ids import RequestId
from common.logprobs import TokenLogprobs
from common.messages import Plan, SequenceOutput, Submit
from gateway.router import PlanChoice, WorkerView
from gateway.workers.session import DecodeSession


class Stage(enum.IntEnum):
    """How far a prompt has come on its decode worker."""

    SUBMITTED = 0  # neither accepted nor refused
    ACCEPTED = 1  # the worker owns it
    STARTED = 2  # its prompt is being computed
    WRITING = 3  # the first token has come
    FLOWING = 4  # a sample's second token has come: the prompt's KV is where it is needed
    ENDED = 5  # all samples finished, or refused, lost or left


class Attempt:
    """Where a prompt and its samples are on one decode worker. Is the session's sink for them; owned by one flow."""

    def __init__(
        self,
        submit: Submit,
        worker: WorkerView,
        session: DecodeSession,
        on_started: Callable[[int], None],
        on_prompt_logprobs: Callable[[tuple[TokenLogprobs, ...]], None],
        on_output: Callable[[SequenceOutput], None],
    ) -> None:
        self.submit = submit
        """What the worker is asked for."""
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
        self._is_preempted = False
        self._session = session
        self._written = dict.fromkeys(
            (sample.index for sample in submit.samples), 0
        )  # outputs of each sample that is not over
        self._on_started = on_started
        self._on_prompt_logprobs = on_prompt_logprobs
        self._on_output = on_output
        self._news = asyncio.Event()

    # ---- what the flow does ----

    @property
    def request_id(self) -> RequestId:
        """The name of the attempt."""
        return self.submit.request_id

    def begin(self) -> None:
        """Ask the worker; raises Unavailable when it is not connected."""
        self._session.submit(self.submit, self)

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

    async def wait_preempted(self) -> bool:
        """Wait until the only sample is to be computed again, which is true, or the attempt has ended."""
        while not self.has_ended and not self._is_preempted:
            await self._wait_news()
        return not self.has_ended

    def restart(self, submit: Submit) -> None:
        """Begin again from the planning on, with what ``submit`` holds so far."""
        self.submit = submit
        self._written = dict.fromkeys(self._written, 0)
        self._is_preempted = False
        self._reach(Stage.ACCEPTED)

    def leave_sample(self, index: int, reason: str) -> None:
        """Give one sample up here; with the last one, the prompt."""
        self._written.pop(index, None)
        if self._written:
            self._session.abort_sample(self.request_id, index, reason)
        else:
            self.leave(reason)

    def leave(self, reason: str) -> None:
        """Give the prompt up here; does nothing when it has ended."""
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
        """See :class:`gateway.workers.session.Sink`."""
        self.was_accepted = True
        self.held_tokens = cached_tokens
        self._reach(Stage.ACCEPTED)

    def refused(self, error: BatonError) -> None:
        """See :class:`gateway.workers.session.Sink`."""
        self.error = error
        self._reach(Stage.ENDED)

    def started(self, cached_tokens: int) -> None:
        """See :class:`gateway.workers.session.Sink`."""
        if self.stage is Stage.ACCEPTED:
            self._on_started(cached_tokens)
            self._reach(Stage.STARTED)

    def prompt_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """See :class:`gateway.workers.session.Sink`."""
        self._on_prompt_logprobs(logprobs)

    def output(self, output: SequenceOutput) -> None:
        """See :class:`gateway.workers.session.Sink`."""
        index = output.sample_index
        if self.has_ended:
            return
        if index in self._written and (output.token_ids or output.finish is not None):
            self._on_output(output)
        if output.error is not None:
            self.error = from_detail(output.error)
            self._reach(Stage.ENDED)
        elif index in self._written:  # the flow has not had enough of it
            self._has_output(index, is_over=output.finish is not None)

    def _has_output(self, index: int, *, is_over: bool) -> None:
        self._is_preempted = False  # it runs again
        self._written[index] += 1
        reached = Stage.FLOWING if self._written[index] > 1 else Stage.WRITING
        if is_over:
            del self._written[index]
        self._reach(max(self.stage, reached) if self._written else Stage.ENDED)

    def preempted(self, cached_tokens: int) -> None:
        """See :class:`gateway.workers.session.Sink`."""
        if Stage.WRITING <= self.stage < Stage.ENDED:
            self.held_tokens = cached_tokens
            self._is_preempted = True
            self._news.set()

    def lost(self, error: BatonError) -> None:
        """See :class:`gateway.workers.session.Sink`."""
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

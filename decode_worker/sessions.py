"""The streams to gateways: what comes in on them goes to who deals with it, and what they are told goes out.

When a gateway goes, whatever it had here is aborted.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from common.constraint import Constraint
from common.errors import InvalidRequest, to_detail
from common.ids import RequestId
from common.messages import Abort, Plan, Refused, SessionDown, SessionUp, Submit
from common.sampling import SamplingParams
from decode_worker.answers import Answers
from decode_worker.intake import Intake
from decode_worker.outbox import Outbox
from decode_worker.plans import Plans
from decode_worker.roster import Roster
from kvstore.host.grammars import Grammars


class Sessions:
    """Owns the open streams, and the grammars that are being compiled for them as tasks of ``group``."""

    def __init__(
        self,
        grammars: Grammars,
        roster: Roster,
        intake: Intake,
        plans: Plans,
        answers: Answers,
        group: asyncio.TaskGroup,
    ) -> None:
        self._grammars = grammars
        self._roster = roster
        self._intake = intake
        self._plans = plans
        self._answers = answers
        self._group = group
        self._open: set[Outbox] = set()
        self._compiling: dict[RequestId, asyncio.Task[None]] = {}
        self._closed = False

    async def serve(self, messages: AsyncIterator[SessionUp]) -> AsyncGenerator[SessionDown, None]:
        """Serve one gateway until it goes; then whatever it had here is aborted."""
        outbox = Outbox()
        self._open.add(outbox)
        reader = asyncio.create_task(self._read(messages, outbox))
        try:
            async for message in outbox.messages():
                yield message
            if not self._closed:
                await reader
        finally:
            reader.cancel()
            outbox.close()
            self._open.discard(outbox)
            for request in self._roster.requests():
                if request.outbox is outbox:
                    self._answers.leave(request)

    def close(self) -> None:
        """End every stream once what it has to tell was sent."""
        self._closed = True
        for outbox in self._open:
            outbox.close()

    async def _read(self, messages: AsyncIterator[SessionUp], outbox: Outbox) -> None:
        try:
            async for message in messages:
                match message:
                    case Submit(sampling=SamplingParams(constraint=Constraint() as constraint)):
                        self._compiling[message.request_id] = self._group.create_task(
                            self._submit_constrained(message, constraint, outbox)
                        )
                    case Submit():
                        self._intake.submit(message, outbox)
                    case Plan():
                        self._plans.follow(message)
                    case Abort():
                        self._abort(message)
        finally:
            outbox.close()

    async def _submit_constrained(self, submit: Submit, constraint: Constraint, outbox: Outbox) -> None:
        """Submit a prompt once its grammar is compiled, unless it is aborted until then."""
        try:
            grammar = await self._grammars.get(constraint)
            if not outbox.is_closed:
                self._intake.submit(submit, outbox, grammar)
        except InvalidRequest as error:
            outbox.put(Refused(submit.request_id, to_detail(error)))
        finally:
            self._compiling.pop(submit.request_id, None)

    def _abort(self, abort: Abort) -> None:
        if abort.request_id in self._compiling:
            self._compiling[abort.request_id].cancel()
        request = self._roster.get(abort.request_id)
        if request is None:
            return
        for index in abort.samples or tuple(request.samples):
            if index in request.samples:
                self._answers.end_sample(request, index)

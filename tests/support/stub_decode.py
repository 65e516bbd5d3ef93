"""A decode worker and a prefill worker without a model: the real protocol, scripted tokens, faults on demand.

Both publish a record in a real registry. The decode worker serves Hello and Session over gRPC; the prefill worker reads
its queue and tells the decode worker, directly, what an Offer and a Handover would have told it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from redis.asyncio import Redis

from common import queue, registry
from common.errors import BatonError, to_detail
from common.ids import Epoch, RequestId, TransferId, WorkerId, new_epoch
from common.messages import (
    Abort,
    Accepted,
    BlockCounts,
    Fingerprint,
    Hello,
    HelloReply,
    Plan,
    PlanKind,
    Prefill,
    Refused,
    Role,
    SequenceOutput,
    SessionDown,
    SessionUp,
    SlotCounts,
    Started,
    Submit,
    Tokens,
    WorkerLoad,
    WorkerRecord,
    WorkerState,
)
from common.rpc import Handlers, RpcServer
from common.sampling import finish_reason
from common.services import HELLO, SESSION

TOKEN = "stub-cluster-token"
MODEL = "stub-model"
FINGERPRINT = Fingerprint("model", "tokenizer", "shape", "float32", "none", 16, "v1")
BEAT_S = 0.2
OFFER_WAIT_S = 2.0

Script = Callable[[Submit], Sequence[int]]
"""The whole answer to a prompt, from its first output token on."""


def record(worker_id: str, role: Role, **changes: object) -> WorkerRecord:
    """Return the record of an idle worker."""
    fields: dict[str, object] = {
        "worker_id": WorkerId(worker_id),
        "role": role,
        "epoch": Epoch(1),
        "pid": 1,
        "address": "127.0.0.1:1",
        "state": WorkerState.READY,
        "device": "cpu",
        "fingerprint": FINGERPRINT,
        "model": MODEL,
        "max_model_len": 256,
        "load": WorkerLoad(0, 0, 0, 1000.0, 0.0),
        "blocks": BlockCounts(10_000, 10_000, 0, 0, 0),
        "slots": SlotCounts(0, 0),
        "counters": {},
    }
    return WorkerRecord(**(fields | changes))  # type: ignore[arg-type]


@dataclass(slots=True)
class Faults:
    """What a stub decode worker does wrong; set before or while it runs."""

    refuse: BatonError | None = None
    """Answer every Submit with this."""
    is_silent: bool = False
    """Answer no Submit."""
    die_after: int | None = None
    """Break every stream, for good, once a sequence has so many output tokens."""
    give_up_after: int | None = None
    give_up_error: BatonError | None = None
    """Give a sequence up with this error once it has so many output tokens."""
    repeat: bool = False
    """Send each token a second time, together with the next."""
    skip_after: int | None = None
    """Leave a token out once a sequence has so many."""
    pause_after: int | None = None
    """Write no more, once a sequence has so many output tokens, until ``resume`` is called."""


@dataclass(slots=True, eq=False)
class _Sequence:
    submit: Submit
    answer: Sequence[int]
    outbox: "asyncio.Queue[SessionDown]"
    num_output_tokens: int
    transfer_id: TransferId | None = None
    is_running: bool = False


class StubDecode:
    """One life of a stub decode worker. Remembers all that gateways sent it."""

    def __init__(self, redis: Redis, script: Script, *, name: str = "decode-0", cached_tokens: int = 0) -> None:
        self.faults = Faults()
        self.cached_tokens = cached_tokens
        self.submits: list[Submit] = []
        self.plans: list[Plan] = []
        self.aborts: list[RequestId] = []
        self.sequences: dict[RequestId, _Sequence] = {}
        self.record = record(name, Role.DECODE, epoch=new_epoch())
        self._redis = redis
        self._script = script
        self._has_work = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        handlers = Handlers(unary={HELLO: self._hello}, stream={}, bidi={SESSION: self._session})
        self._server = RpcServer("127.0.0.1", 0, handlers, TOKEN)

    # ---- life ----

    async def start(self) -> None:
        """Serve, and publish the record."""
        await self._server.start()
        self.change(address=self._server.address)
        await self.beat()
        self._tasks = [asyncio.create_task(self._beats()), asyncio.create_task(self._steps())]

    async def stop(self) -> None:
        """End at once, as if killed; the record stays until it expires."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(0)

    def change(self, **changes: object) -> None:
        """Change the record from the next beat on."""
        fields = {name: getattr(self.record, name) for name in self.record.__struct_fields__}
        self.record = WorkerRecord(**(fields | changes))

    async def beat(self) -> None:
        """Publish the record now."""
        with contextlib.suppress(Exception):  # Redis may be away, which is what some tests are about
            await registry.publish(self._redis, self.record)

    def resume(self) -> None:
        """Let paused sequences go on."""
        self.faults.pause_after = None
        self._notify()

    async def wait_for(self, condition: Callable[["StubDecode"], bool]) -> None:
        """Wait until ``condition`` holds after something was received or sent."""
        while not condition(self):
            self._changed.clear()
            await self._changed.wait()

    def _notify(self) -> None:
        self._has_work.set()
        self._changed.set()

    # ---- what a prefill worker tells ----

    async def offered(self, transfer_id: TransferId, cached_tokens: int) -> bool:
        """Take an offer, which may be ahead of its Plan; return whether the transfer is expected."""
        try:
            async with asyncio.timeout(OFFER_WAIT_S):
                await self.wait_for(lambda stub: transfer_id in stub._expected())
        except TimeoutError:
            return False
        sequence = self._expected()[transfer_id]
        sequence.outbox.put_nowait(Started(sequence.submit.request_id, cached_tokens))
        return True

    def handed_over(self, transfer_id: TransferId) -> None:
        """The first token and all blocks have come."""
        sequence = self._expected().get(transfer_id)
        if sequence is not None:
            sequence.is_running = True
            self._notify()

    def _expected(self) -> dict[TransferId, _Sequence]:
        return {one.transfer_id: one for one in self.sequences.values() if one.transfer_id is not None}

    # ---- gateways ----

    async def _hello(self, hello: Hello) -> HelloReply:
        return HelloReply(self.record.worker_id, self.record.epoch, self.record.fingerprint)

    async def _session(self, messages: AsyncIterator[SessionUp]) -> AsyncIterator[SessionDown]:
        outbox: asyncio.Queue[SessionDown] = asyncio.Queue()
        reader = asyncio.create_task(self._read(messages, outbox))
        try:
            while True:
                yield await outbox.get()
        finally:
            reader.cancel()
            for request_id in [key for key, sequence in self.sequences.items() if sequence.outbox is outbox]:
                del self.sequences[request_id]
            self._notify()

    async def _read(self, messages: AsyncIterator[SessionUp], outbox: "asyncio.Queue[SessionDown]") -> None:
        async for message in messages:
            match message:
                case Submit():
                    self._submit(message, outbox)
                case Plan():
                    self._planned(message)
                case Abort():
                    self.aborts.append(message.request_id)
                    self.sequences.pop(message.request_id, None)
            self._notify()

    def _submit(self, submit: Submit, outbox: "asyncio.Queue[SessionDown]") -> None:
        self.submits.append(submit)
        if self.faults.is_silent:
            return
        if self.faults.refuse is not None:
            outbox.put_nowait(Refused(submit.request_id, to_detail(self.faults.refuse)))
            return
        num_output_tokens = len(submit.token_ids) - submit.num_prompt_tokens
        self.sequences[submit.request_id] = _Sequence(submit, self._script(submit), outbox, num_output_tokens)
        outbox.put_nowait(Accepted(submit.request_id, self.cached_tokens))

    def _planned(self, plan: Plan) -> None:
        self.plans.append(plan)
        sequence = self.sequences.get(plan.request_id)
        if sequence is None:
            return
        sequence.transfer_id = plan.transfer_id
        if plan.kind is PlanKind.LOCAL:
            sequence.outbox.put_nowait(Started(plan.request_id, self.cached_tokens))
            sequence.is_running = True

    # ---- steps ----

    async def _steps(self) -> None:
        while True:
            stepped = self._step()
            if self.faults.die_after is not None and self._longest() >= self.faults.die_after:
                await asyncio.sleep(0)
                await self._server.stop(0.05)
                return
            if stepped:
                self._changed.set()
                await asyncio.sleep(0)
                continue
            self._has_work.clear()
            await self._has_work.wait()

    def _longest(self) -> int:
        return max((sequence.num_output_tokens for sequence in self.sequences.values()), default=0)

    def _step(self) -> bool:
        """Write one token of each running sequence; return whether there was one."""
        outputs: dict[asyncio.Queue[SessionDown], list[SequenceOutput]] = {}
        for request_id, sequence in list(self.sequences.items()):
            paused = self.faults.pause_after
            if sequence.is_running and (paused is None or sequence.num_output_tokens < paused):
                outputs.setdefault(sequence.outbox, []).append(self._output(request_id, sequence))
        for outbox, parts in outputs.items():
            outbox.put_nowait(Tokens(tuple(parts)))
        return bool(outputs)

    def _output(self, request_id: RequestId, sequence: _Sequence) -> SequenceOutput:
        faults, at = self.faults, sequence.num_output_tokens
        if faults.give_up_error is not None and at == faults.give_up_after:
            del self.sequences[request_id]
            return SequenceOutput(request_id, at, (), None, to_detail(faults.give_up_error))
        if at == faults.skip_after:
            at += 1
        token_id = sequence.answer[at % len(sequence.answer)]
        sequence.num_output_tokens = at + 1
        finish = finish_reason(token_id, at + 1, sequence.submit.sampling)
        if finish is not None:
            del self.sequences[request_id]
        if faults.repeat and at > 0:
            return SequenceOutput(request_id, at - 1, (sequence.answer[at - 1], token_id), finish)
        return SequenceOutput(request_id, at, (token_id,), finish)

    async def _beats(self) -> None:
        while True:
            await self.beat()
            await asyncio.sleep(BEAT_S)


@dataclass(slots=True)
class StubPrefill:
    """A prefill worker that computes nothing. ``is_idle`` lets it take nothing from its queue."""

    redis: Redis
    decodes: Sequence[StubDecode]
    name: str = "prefill-0"
    cached_tokens: int = 0
    is_idle: bool = False
    hands_over: bool = True
    tasks: list[Prefill] = field(default_factory=list)
    record: WorkerRecord = field(init=False)
    _running: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.record = record(self.name, Role.PREFILL, epoch=new_epoch())

    async def start(self) -> None:
        """Publish the record and read the queue."""
        await queue.create(self.redis, self.record.worker_id, self.record.epoch)
        await registry.publish(self.redis, self.record)
        self._running = [asyncio.create_task(self._beats())]
        if not self.is_idle:
            self._running.append(asyncio.create_task(self._work()))

    async def stop(self, *, forget: bool = False) -> None:
        """End at once, as if killed; ``forget`` removes the record too, as if it had expired."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        if forget:
            await registry.withdraw(self.redis, self.record.worker_id)

    async def _beats(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # as in StubDecode.beat
                await registry.publish(self.redis, self.record)
            await asyncio.sleep(BEAT_S)

    async def _work(self) -> None:
        worker_id, epoch = self.record.worker_id, self.record.epoch
        while True:
            for entry_id, task in await queue.take(self.redis, worker_id, epoch, count=16, block_s=0.2):
                self.tasks.append(task)
                await self._offer(task)
                await queue.acknowledge(self.redis, worker_id, epoch, [entry_id])

    async def _offer(self, task: Prefill) -> None:
        decode = next(decode for decode in self.decodes if decode.record.address == task.decode_address)
        if await decode.offered(task.transfer_id, self.cached_tokens) and self.hands_over:
            decode.handed_over(task.transfer_id)

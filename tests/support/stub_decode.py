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
from common.logprobs import TokenLogprobs
from common.messages import (
    Abort,
    Accepted,
    BlockCounts,
    Fingerprint,
    Hello,
    HelloReply,
    Plan,
    PlanKind,
    Preempted,
    Prefill,
    PromptLogprobs,
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

Script = Callable[[Submit, int], Sequence[int]]
"""A whole answer to a prompt, from its first output token on, by the index of the sample."""


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
    answers: dict[int, Sequence[int]]
    outbox: "asyncio.Queue[SessionDown]"
    written: dict[int, int]
    """Output tokens of each sample that is not over."""
    transfer_id: TransferId | None = None
    is_running: bool = False

    @property
    def num_output_tokens(self) -> int:
        """Of the longest sample."""
        return max(self.written.values(), default=0)


def scripted_logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    """Return what a stub says of a token: it is the likeliest, and the next ids follow it."""
    top = range(token_id, token_id + num_top)
    return TokenLogprobs(-token_id / 1000, 1, tuple(top), tuple(-one / 1000 for one in top))


class StubDecode:
    """One life of a stub decode worker. Remembers all that gateways sent it."""

    def __init__(self, redis: Redis, script: Script, *, name: str = "decode-0", cached_tokens: int = 0) -> None:
        self.faults = Faults()
        self.cached_tokens = cached_tokens
        self.submits: list[Submit] = []
        self.plans: list[Plan] = []
        self.aborts: list[RequestId] = []
        self.logprobs = scripted_logprobs
        self.sample_aborts: list[int] = []
        """Indices of the samples that were given up while others of their prompt went on."""
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

    def preempt(self) -> None:
        """Let every sequence lose its KV; it goes on when it is planned again."""
        for sequence in self.sequences.values():
            sequence.is_running, sequence.transfer_id = False, None
            sequence.outbox.put_nowait(Preempted(sequence.submit.request_id, self.cached_tokens))

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
        self._start(sequence, cached_tokens)
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
                    self._aborted(message)
            self._notify()

    def _submit(self, submit: Submit, outbox: "asyncio.Queue[SessionDown]") -> None:
        self.submits.append(submit)
        if self.faults.is_silent:
            return
        if self.faults.refuse is not None:
            outbox.put_nowait(Refused(submit.request_id, to_detail(self.faults.refuse)))
            return
        answers = {sample.index: self._script(submit, sample.index) for sample in submit.samples}
        written = {sample.index: len(sample.output_ids) for sample in submit.samples}
        self.sequences[submit.request_id] = _Sequence(submit, answers, outbox, written)
        outbox.put_nowait(Accepted(submit.request_id, self.cached_tokens))

    def _aborted(self, abort: Abort) -> None:
        sequence = self.sequences.get(abort.request_id)
        for index in abort.samples if sequence else ():
            sequence.written.pop(index, None)  # type: ignore[union-attr]
        if not abort.samples or (sequence and not sequence.written):
            self.aborts.append(abort.request_id)
            self.sequences.pop(abort.request_id, None)
        else:
            self.sample_aborts += abort.samples

    def _planned(self, plan: Plan) -> None:
        self.plans.append(plan)
        sequence = self.sequences.get(plan.request_id)
        if sequence is None:
            return
        sequence.transfer_id = plan.transfer_id
        if plan.kind is PlanKind.LOCAL:
            self._start(sequence, self.cached_tokens)
            sequence.is_running = True

    # ---- steps ----

    async def _steps(self) -> None:
        while True:
            stepped = self._step()
            if self.faults.die_after is not None and self.num_written >= self.faults.die_after:
                await asyncio.sleep(0)
                await self._server.stop(0.05)
                return
            if stepped:
                self._changed.set()
                await asyncio.sleep(0)
                continue
            self._has_work.clear()
            await self._has_work.wait()

    @property
    def num_written(self) -> int:
        """Tokens of the sequence here that has most."""
        return max((sequence.num_output_tokens for sequence in self.sequences.values()), default=0)

    def _step(self) -> bool:
        """Write one token of each sample of each running sequence; return whether there was one."""
        outputs: dict[asyncio.Queue[SessionDown], list[SequenceOutput]] = {}
        for request_id, sequence in list(self.sequences.items()):
            paused = self.faults.pause_after
            for index, num_tokens in list(sequence.written.items()):
                if sequence.is_running and (paused is None or num_tokens < paused):
                    outputs.setdefault(sequence.outbox, []).append(self._output(request_id, sequence, index))
        for outbox, parts in outputs.items():
            outbox.put_nowait(Tokens(tuple(parts)))
        return bool(outputs)

    def _output(self, request_id: RequestId, sequence: _Sequence, index: int) -> SequenceOutput:
        faults, at, answer = self.faults, sequence.written[index], sequence.answers[index]
        if faults.give_up_error is not None and at == faults.give_up_after:
            self.sequences.pop(request_id, None)
            return SequenceOutput(request_id, at, (), None, to_detail(faults.give_up_error), index)
        if at == faults.skip_after:
            at += 1
        token_id = answer[at % len(answer)]
        sequence.written[index] = at + 1
        finish = finish_reason(token_id, at + 1, sequence.submit.sampling)
        if finish is not None:
            del sequence.written[index]
            if not sequence.written:
                self.sequences.pop(request_id, None)
        first = at - 1 if faults.repeat and at > 0 else at
        token_ids = (*answer[first:at], token_id)
        return SequenceOutput(
            request_id, first, token_ids, finish, sample_index=index, logprobs=self._logprobs(sequence, token_ids)
        )

    def _logprobs(self, sequence: _Sequence, token_ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
        num_top = sequence.submit.sampling.logprobs
        return () if num_top is None else tuple(self.logprobs(token_id, num_top) for token_id in token_ids)

    def _start(self, sequence: _Sequence, cached_tokens: int) -> None:
        submit = sequence.submit
        sequence.outbox.put_nowait(Started(submit.request_id, cached_tokens))
        num_top = submit.sampling.prompt_logprobs
        if num_top is not None:
            scores = tuple(self.logprobs(token_id, num_top) for token_id in submit.token_ids[1:])
            sequence.outbox.put_nowait(PromptLogprobs(submit.request_id, scores))

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

"""A prefill and a decode worker in this process, and a minimal gateway that drives them with token ids."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from redis.asyncio import Redis

from common import queue
from common.ids import RequestId, new_request_id, new_transfer_id
from common.logprobs import TokenLogprobs
from common.messages import (
    Abort,
    Accepted,
    PeerPrefix,
    Plan,
    PlanKind,
    Preempted,
    Prefill,
    PromptLogprobs,
    Refused,
    Role,
    Sample,
    SequenceOutput,
    SessionDown,
    Started,
    Submit,
    Tokens,
)
from common.redis_client import connect
from common.rpc import Duplex, RpcClient
from common.sampling import FinishReason, SamplingParams
from common.services import SESSION
from common.tls import load_tls
from kvstore.block_pool import BlockPool
from kvstore.host.config import WorkerConfig
from kvstore.host.host import Host

TOKEN = "test-token"
LIMIT_S = 120.0


@dataclass
class Answer:
    """What came back for one request."""

    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    accepted_cached: int = 0
    started_cached: int | None = None
    num_outputs: int = 0
    """Messages that brought a token, or nothing but the news that a beam search has begun."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


class Split:
    """Drives one decode worker and one prefill worker. ``prefill`` and ``decode`` are the hosts."""

    def __init__(self, prefill: Host, decode: Host, redis: Redis, stream: Duplex) -> None:
        self.prefill = prefill
        self.decode = decode
        self.redis = redis
        self._stream = stream
        self.recomputes_remotely = False
        """Have what is preempted computed again by the prefill worker."""
        self._inboxes: dict[RequestId, asyncio.Queue[Any]] = {}

    async def dispatch(self) -> None:
        """Route what the decode worker sends to its request."""
        async for message in self._stream.receive():
            self._route(message)

    def _route(self, message: SessionDown) -> None:
        if isinstance(message, Tokens):
            for output in message.outputs:
                self._inboxes[output.request_id].put_nowait(output)
        else:
            self._inboxes[message.request_id].put_nowait(message)

    async def generate(
        self,
        token_ids: list[int],
        kind: PlanKind = PlanKind.REMOTE,
        *,
        num_prompt_tokens: int | None = None,
        sample_index: int = 0,
        **options: Any,
    ) -> Answer:
        """Serve one request with one sample; what follows ``num_prompt_tokens`` is its output so far.

        ``options`` are as of :meth:`generate_all`.
        """
        prompt = token_ids[:num_prompt_tokens]
        sample = Sample(sample_index, tuple(token_ids[len(prompt) :]))
        return (await self.generate_all(prompt, kind, (sample,), **options))[sample_index]

    async def generate_all(
        self,
        prompt: list[int],
        kind: PlanKind,
        samples: tuple[Sample, ...],
        *,
        leave_after: int | None = None,
        leaves: tuple[int, ...] = (),
        salt: str = "",
        peer: PeerPrefix | None = None,
        plan_delay_s: float = 0.0,
        **sampling: Any,
    ) -> dict[int, Answer]:
        """Serve one request; return its answers by the index of the sample.

        After ``leave_after`` outputs of one, if given, the samples ``leaves`` are aborted, or all if it is empty;
        a remote plan is sent ``plan_delay_s`` after the prompt was queued.
        """
        request_id = new_request_id()
        inbox = self._inboxes[request_id] = asyncio.Queue()
        params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))
        answers = {sample.index: Answer() for sample in samples}
        submit = Submit(request_id, tuple(prompt), params, samples, salt)
        async with asyncio.timeout(LIMIT_S):
            await self._stream.send(submit)
            reply: Accepted | Refused = await inbox.get()
            for answer in answers.values():
                if isinstance(reply, Refused):
                    answer.error = reply.error.type
                else:
                    answer.accepted_cached = reply.cached_tokens
            if isinstance(reply, Accepted):
                await self._plan(submit, kind, peer, plan_delay_s)
                await self._collect(inbox, submit, answers, leave_after, leaves)
        return answers

    async def _plan(self, submit: Submit, kind: PlanKind, peer: PeerPrefix | None, plan_delay_s: float) -> None:
        if kind is PlanKind.LOCAL:
            await self._stream.send(Plan(submit.request_id, kind, peer=peer))
            return
        assert self.prefill.parts is not None
        assert self.decode.parts is not None
        transfer_id = new_transfer_id()
        if not plan_delay_s:
            await self._stream.send(Plan(submit.request_id, kind, transfer_id))
        target, decode = self.prefill.parts, self.decode.parts
        task = Prefill(
            request_id=submit.request_id,
            transfer_id=transfer_id,
            token_ids=submit.shared_ids,
            num_prompt_tokens=len(submit.token_ids),
            sampling=submit.sampling,
            decode_worker=decode.worker_id,
            decode_epoch=decode.epoch,
            decode_address=decode.address,
            remaining_s=LIMIT_S,
            cache_salt=submit.cache_salt,
            peer=peer,
            sample_indices=submit.next_indices,
        )
        await queue.push(self.redis, target.worker_id, target.epoch, task)
        if plan_delay_s:
            await asyncio.sleep(plan_delay_s)
            await self._stream.send(Plan(submit.request_id, kind, transfer_id))

    async def _collect(
        self,
        inbox: asyncio.Queue[Any],
        submit: Submit,
        answers: dict[int, Answer],
        leave_after: int | None,
        leaves: tuple[int, ...],
    ) -> None:
        num_before = {sample.index: len(sample.output_ids) for sample in submit.samples}
        left: set[int] = set()
        while any(not (one.finish or one.error or index in left) for index, one in answers.items()):
            if leave_after is not None and not left and _longest(answers) >= leave_after:
                await self._stream.send(Abort(submit.request_id, samples=leaves))
                left |= set(leaves or answers)
                continue
            message: Started | PromptLogprobs | SequenceOutput | Preempted = await inbox.get()
            match message:
                case Preempted() if self.recomputes_remotely:
                    await self._plan(_so_far(submit, answers), PlanKind.REMOTE, None, 0.0)
                case Started():
                    for answer in answers.values():
                        answer.started_cached = message.cached_tokens
                case PromptLogprobs():
                    for answer in answers.values():
                        assert answer.prompt_logprobs is None
                        answer.prompt_logprobs = message.logprobs
                case SequenceOutput(error=None):
                    answer = answers[message.sample_index]
                    assert message.output_index == num_before[message.sample_index] + len(answer.token_ids)
                    answer.num_outputs += 1
                    answer.token_ids += message.token_ids
                    answer.logprobs += message.logprobs
                    answer.finish = message.finish
                case SequenceOutput():
                    assert message.error is not None
                    for answer in answers.values():
                        answer.error = message.error.type

    async def wait_idle(self) -> None:
        """Wait until no block is held on either side, and check the books."""
        async with asyncio.timeout(LIMIT_S):
            for host in (self.prefill, self.decode):
                assert host.parts is not None
                while _num_in_use(host.parts.model.pool):  # noqa: ASYNC110 - nothing tells when a pool is empty
                    await asyncio.sleep(0.01)
                host.parts.model.pool.check_integrity([])


def _so_far(submit: Submit, answers: dict[int, Answer]) -> Submit:
    """Return ``submit`` with what the samples have been given since."""
    samples = tuple(Sample(one.index, (*one.output_ids, *answers[one.index].token_ids)) for one in submit.samples)
    return msgspec.structs.replace(submit, samples=samples)


def _longest(answers: dict[int, Answer]) -> int:
    return max(answer.num_outputs for answer in answers.values())


def _num_in_use(pool: BlockPool) -> int:
    counts = pool.counts()
    return counts.held + counts.quarantined


async def started(host: Host, group: asyncio.TaskGroup) -> asyncio.Task[None]:
    """Run ``host`` in ``group``; return once it is ready or has failed."""
    task = group.create_task(host.run())
    ready = group.create_task(host.ready.wait())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    return task


@asynccontextmanager
async def split(model: str, redis_url: str, **options: Any) -> AsyncIterator[Split]:
    """Run one prefill and one decode worker on ``model`` with small chunks; ``options`` change their configuration."""
    defaults = {"kv_blocks": 256, "token_budget": 48, "local_chunk_tokens": 16, "threads": 1, "drain_seconds": 5.0}
    config = WorkerConfig(model=model, redis=redis_url, cluster_token=TOKEN, **(defaults | options))
    prefill, decode = Host(config, Role.PREFILL), Host(config, Role.DECODE)
    async with connect(redis_url) as redis, asyncio.TaskGroup() as group:
        for host in (prefill, decode):
            await started(host, group)
        assert decode.parts is not None
        client = RpcClient(decode.parts.address, TOKEN, load_tls(config.tls_cert, config.tls_key, config.tls_ca))
        cluster = Split(prefill, decode, redis, client.open(SESSION))
        dispatcher = group.create_task(cluster.dispatch())
        try:
            yield cluster
            await cluster.wait_idle()
        finally:
            dispatcher.cancel()
            decode.stop()
            prefill.stop()
            await client.close()

"""A prefill and a decode worker in this process, and a minimal gateway that drives them with token ids."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from common import queue
from common.ids import RequestId, new_request_id, new_transfer_id
from common.messages import (
    Abort,
    Accepted,
    PeerPrefix,
    Plan,
    PlanKind,
    Prefill,
    Refused,
    Role,
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


class Split:
    """Drives one decode worker and one prefill worker. ``prefill`` and ``decode`` are the hosts."""

    def __init__(self, prefill: Host, decode: Host, redis: Redis, stream: Duplex) -> None:
        self.prefill = prefill
        self.decode = decode
        self.redis = redis
        self._stream = stream
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
        leave_after: int | None = None,
        salt: str = "",
        peer: PeerPrefix | None = None,
        plan_delay_s: float = 0.0,
        **sampling: Any,
    ) -> Answer:
        """Serve one request.

        It is aborted after ``leave_after`` output tokens, if given; a remote plan is sent ``plan_delay_s`` after the
        prompt was queued.
        """
        request_id = new_request_id()
        inbox = self._inboxes[request_id] = asyncio.Queue()
        params = SamplingParams(**({"max_tokens": 8, "temperature": 0.0} | sampling))
        answer = Answer()
        async with asyncio.timeout(LIMIT_S):
            await self._stream.send(
                Submit(request_id, tuple(token_ids), num_prompt_tokens or len(token_ids), params, salt)
            )
            reply: Accepted | Refused = await inbox.get()
            if isinstance(reply, Refused):
                answer.error = reply.error.type
                return answer
            answer.accepted_cached = reply.cached_tokens
            await self._plan(
                request_id, token_ids, num_prompt_tokens or len(token_ids), params, kind, salt, peer, plan_delay_s
            )
            num_before = len(token_ids) - (num_prompt_tokens or len(token_ids))
            await self._collect(inbox, answer, leave_after, num_before)
            if leave_after is not None:
                await self._stream.send(Abort(request_id))
        return answer

    async def _plan(
        self,
        request_id: RequestId,
        token_ids: list[int],
        num_prompt_tokens: int,
        params: SamplingParams,
        kind: PlanKind,
        salt: str,
        peer: PeerPrefix | None,
        plan_delay_s: float,
    ) -> None:
        if kind is PlanKind.LOCAL:
            await self._stream.send(Plan(request_id, kind, peer=peer))
            return
        assert self.prefill.parts is not None
        assert self.decode.parts is not None
        transfer_id = new_transfer_id()
        if not plan_delay_s:
            await self._stream.send(Plan(request_id, kind, transfer_id))
        target, decode = self.prefill.parts, self.decode.parts
        task = Prefill(
            request_id=request_id,
            transfer_id=transfer_id,
            token_ids=tuple(token_ids),
            num_prompt_tokens=num_prompt_tokens,
            sampling=params,
            decode_worker=decode.worker_id,
            decode_epoch=decode.epoch,
            decode_address=decode.address,
            remaining_s=LIMIT_S,
            cache_salt=salt,
            peer=peer,
        )
        await queue.push(self.redis, target.worker_id, target.epoch, task)
        if plan_delay_s:
            await asyncio.sleep(plan_delay_s)
            await self._stream.send(Plan(request_id, kind, transfer_id))

    async def _collect(
        self, inbox: asyncio.Queue[Any], answer: Answer, leave_after: int | None, num_before: int
    ) -> None:
        while leave_after is None or len(answer.token_ids) < leave_after:
            message: Started | SequenceOutput = await inbox.get()
            if isinstance(message, Started):
                answer.started_cached = message.cached_tokens
                continue
            assert message.output_index == num_before + len(answer.token_ids) or message.error
            answer.token_ids += message.token_ids
            answer.finish = message.finish
            answer.error = message.error.type if message.error else None
            if message.finish or message.error:
                return

    async def wait_idle(self) -> None:
        """Wait until no block is held on either side, and check the books."""
        async with asyncio.timeout(LIMIT_S):
            for host in (self.prefill, self.decode):
                assert host.parts is not None
                while _num_in_use(host.parts.model.pool):  # noqa: ASYNC110 - nothing tells when a pool is empty
                    await asyncio.sleep(0.01)
                host.parts.model.pool.check_integrity([])


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

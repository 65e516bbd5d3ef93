"""Whole messages that are lost or change places, and damaged bytes, between a gateway and a decode worker.

A worker in this process behind a proxy that follows HTTP/2; what must hold is that the session ends with an error
within seconds, whatever was lost: the last token of an answer too.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from common.envelope import SILENCE_S
from common.errors import BatonError, CorruptFrame, Unavailable
from common.ids import new_request_id
from common.messages import Plan, PlanKind, Submit, Tokens
from common.rpc import Duplex, RpcClient
from common.sampling import SamplingParams
from common.services import SESSION
from tests.chaos.proxy import FaultProxy, MessageProxy, Way, proxied
from tests.conftest import RedisServer
from tests.support.split import TOKEN, Split, split

pytestmark = pytest.mark.anyio

NUM_TOKENS = 30


@pytest.fixture
async def workers(model: Path, redis_server: RedisServer) -> AsyncIterator[Split]:
    async with split(str(model), redis_server.url) as running:
        yield running


async def ask(stream: Duplex) -> None:
    request_id = new_request_id()
    await stream.send(Submit(request_id, tuple(range(3, 20)), SamplingParams(NUM_TOKENS, temperature=0.0)))
    await stream.send(Plan(request_id, PlanKind.LOCAL))


async def tokens_until_error(stream: Duplex, seen: list[int], on_first: Callable[[], Any] | None = None) -> BatonError:
    """Read the session until it fails; the tokens that came are in ``seen``."""
    try:
        async with asyncio.timeout(2 * SILENCE_S):
            async for message in stream.receive():
                if isinstance(message, Tokens):
                    if not seen and on_first is not None:
                        on_first()
                    for output in message.outputs:
                        assert output.output_index == len(seen)
                        seen.extend(output.token_ids)
    except BatonError as error:
        return error
    raise AssertionError("the session ended as if nothing had happened")


@asynccontextmanager
async def through(workers: Split, kind: type[FaultProxy]) -> AsyncIterator[tuple[FaultProxy, Duplex]]:
    assert workers.decode.parts is not None
    port = int(workers.decode.parts.address.rpartition(":")[2])
    async with proxied(port, kind) as proxy:
        client = RpcClient(f"127.0.0.1:{proxy.port}", TOKEN)
        try:
            yield proxy, client.open(SESSION)
        finally:
            await client.close()


@pytest.mark.parametrize("fault", [MessageProxy.drop_message, MessageProxy.swap_messages])
@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.value)
async def test_a_lost_or_moved_message_ends_the_session(
    workers: Split, fault: Callable[[FaultProxy, Way], None], way: Way
) -> None:
    seen: list[int] = []
    async with through(workers, MessageProxy) as (proxy, stream):
        await ask(stream)
        error = await tokens_until_error(stream, seen, lambda: fault(proxy, way))
        assert isinstance(error, CorruptFrame), error
        assert proxy.num_damaged == 1
    await workers.wait_idle()


async def test_a_flipped_bit_in_a_token_ends_the_session(workers: Split) -> None:
    seen: list[int] = []
    async with through(workers, MessageProxy) as (proxy, stream):
        await ask(stream)
        error = await tokens_until_error(stream, seen, lambda: proxy.flip(Way.DOWN, after=40))
        assert isinstance(error, CorruptFrame | Unavailable), error
    await workers.wait_idle()


async def test_a_worker_that_vanishes_is_left_within_seconds(workers: Split) -> None:
    def vanish(proxy: FaultProxy) -> None:
        proxy.is_dropping = True

    seen: list[int] = []
    async with through(workers, FaultProxy) as (proxy, stream):
        await ask(stream)
        error = await tokens_until_error(stream, seen, lambda: vanish(proxy))
        assert "has said nothing" in error.message

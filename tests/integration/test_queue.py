"""The prefill queue and the registry against a real server."""

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from common import queue
from common.ids import Epoch, RequestId, TransferId, WorkerId
from common.messages import Prefill
from common.sampling import SamplingParams

pytestmark = pytest.mark.anyio

WORKER, EPOCH = WorkerId("p0"), Epoch(7)


def task(number: int) -> Prefill:
    return Prefill(
        request_id=RequestId(f"r{number}"),
        transfer_id=TransferId(f"t{number}"),
        token_ids=tuple(range(number)),
        num_prompt_tokens=number,
        sampling=SamplingParams(max_tokens=1, seed=2**64 - 1),
        decode_worker=WorkerId("d0"),
        decode_epoch=Epoch(3),
        decode_address="127.0.0.1:1",
        remaining_s=1.5,
    )


async def take(redis: Redis, count: int = 10, epoch: Epoch = EPOCH) -> list[tuple[bytes, Prefill]]:
    return await queue.take(redis, WORKER, epoch, count=count, block_s=0.01)


async def test_tasks_come_in_order_and_stay_until_acknowledged(redis: Redis):
    await queue.create(redis, WORKER, EPOCH)
    for number in (1, 2, 3):
        await queue.push(redis, WORKER, EPOCH, task(number))
    first = await take(redis, count=2)
    assert [entry for _, entry in first] == [task(1), task(2)]
    assert [entry for _, entry in await take(redis)] == [task(3)]
    key = queue.stream_key(WORKER, EPOCH)
    assert await redis.xlen(key) == 3
    await queue.acknowledge(redis, WORKER, EPOCH, [entry_id for entry_id, _ in first])
    assert await redis.xlen(key) == 1
    assert await take(redis) == []


async def test_what_was_pushed_before_the_worker_made_its_group_is_not_lost(redis: Redis):
    await queue.push(redis, WORKER, EPOCH, task(4))
    await queue.create(redis, WORKER, EPOCH)
    await queue.create(redis, WORKER, EPOCH)
    assert [entry for _, entry in await take(redis)] == [task(4)]


async def test_another_epoch_sees_nothing_of_it(redis: Redis):
    await queue.push(redis, WORKER, EPOCH, task(5))
    await queue.create(redis, WORKER, Epoch(8))
    assert await take(redis, epoch=Epoch(8)) == []


async def test_a_flush_is_told_and_the_queue_can_be_made_again(redis: Redis):
    await queue.create(redis, WORKER, EPOCH)
    await redis.flushall()
    with pytest.raises(ResponseError, match="NOGROUP"):
        await take(redis)
    await queue.create(redis, WORKER, EPOCH)
    await queue.push(redis, WORKER, EPOCH, task(6))
    assert [entry for _, entry in await take(redis)] == [task(6)]


async def test_what_was_taken_and_not_acknowledged_is_found_again(redis: Redis):
    await queue.create(redis, WORKER, EPOCH)
    for number in (1, 2):
        await queue.push(redis, WORKER, EPOCH, task(number))
    taken = await take(redis)
    assert await queue.pending(redis, WORKER, EPOCH) == taken
    await queue.acknowledge(redis, WORKER, EPOCH, [taken[0][0]])
    assert await queue.pending(redis, WORKER, EPOCH) == taken[1:]

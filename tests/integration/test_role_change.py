"""A worker takes the other role: its cached blocks stay, its running work ends or moves, nothing is held."""

import asyncio
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from redis.asyncio import Redis

from common.errors import StaleEpoch, Unavailable
from common.ids import Epoch, WorkerId
from common.messages import PlanKind, Role, Sample, TakeRole, WorkerRecord, WorkerState
from common.registry import members
from common.rpc import RpcClient
from common.sampling import BeamParams
from common.services import SESSION, TAKE_ROLE
from kvstore.host.config import WorkerConfig
from kvstore.host.host import Host
from kvstore.prefix_hash import chain_hashes, root_hash
from kvstore.prefix_index import PrefixIndex
from tests.support.reference import Reference
from tests.support.split import TOKEN, Answer, Split, split, started

pytestmark = pytest.mark.anyio

BLOCK = 16
CALL_S = 5.0


@pytest.fixture
async def cluster(model: Path, redis_url: str, scheduling: str) -> AsyncIterator[Split]:
    async with split(str(model), redis_url, async_scheduling=scheduling) as running:
        yield running


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(3, 200), k=length)


async def greedy(reference: Reference, tokens: list[int], count: int) -> list[int]:
    """Return what transformers writes, without blocking the cluster, which lives on this loop."""
    return await asyncio.to_thread(reference.greedy, tokens, count)


async def order(host: Host, role: Role, *, drain_s: float = 5.0, fence: int = 1, epoch: Epoch | None = None) -> None:
    """Send the order that a gateway would."""
    assert host.parts is not None
    client = RpcClient(host.parts.address, TOKEN)
    try:
        await client.call(TAKE_ROLE, TakeRole(epoch or host.parts.epoch, role, drain_s, fence), CALL_S)
    finally:
        await client.close()


async def until(true: Callable[[], bool | Awaitable[bool]]) -> None:
    """Wait until ``true()`` is so."""
    async with asyncio.timeout(60):
        while not (await found if isinstance(found := true(), Awaitable) else found):  # noqa: ASYNC110 - others work
            await asyncio.sleep(0.001)


async def holds(index: PrefixIndex, lives: list[tuple[WorkerId, Epoch]], sizes: list[int]) -> bool:
    return await index.sizes(lives) == sizes


async def changed(redis: Redis, host: Host, role: Role) -> WorkerRecord:
    """Wait until the registry says that ``host`` works in ``role``."""
    assert host.parts is not None
    async with asyncio.timeout(60):
        while True:
            for record in await members(redis):
                is_it = record.worker_id == host.parts.worker_id and record.role is role
                if is_it and record.state is WorkerState.READY:
                    return record
            await asyncio.sleep(0.01)


async def test_the_first_request_after_a_change_hits_what_the_worker_cached_in_its_other_role(
    cluster: Split, redis: Redis, reference: Reference
) -> None:
    tokens = prompt(100)
    await cluster.generate(tokens)
    before = cluster.prefill.parts
    assert before is not None
    await order(cluster.prefill, Role.DECODE)
    record = await changed(redis, cluster.prefill, Role.DECODE)
    after = cluster.prefill.parts
    assert after is not None
    assert (record.epoch, record.worker_id) == (after.epoch, before.worker_id)
    assert after.epoch != before.epoch
    assert after.model is before.model

    client = RpcClient(after.address, TOKEN)
    turned = Split(cluster.decode, cluster.prefill, redis, client.open(SESSION))
    dispatcher = asyncio.create_task(turned.dispatch())
    answer = await turned.generate(tokens, PlanKind.LOCAL)
    assert answer.token_ids == await greedy(reference, tokens, 8)
    assert answer.accepted_cached == answer.started_cached == 96
    dispatcher.cancel()
    await client.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the nice values of threads apart")
async def test_steps_are_nice_to_others_only_while_the_worker_prefills(cluster: Split, redis: Redis) -> None:
    async def nice(host: Host) -> int:
        assert host.parts is not None
        on_thread = await host.parts.compute.call(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return on_thread - os.getpriority(os.PRIO_PROCESS, 0)

    assert [await nice(host) for host in (cluster.prefill, cluster.decode)] == [WorkerConfig(model="-").prefill_nice, 0]
    await order(cluster.prefill, Role.DECODE)
    await changed(redis, cluster.prefill, Role.DECODE)
    assert await nice(cluster.prefill) == 0


async def test_the_index_names_the_cached_blocks_under_the_new_epoch(cluster: Split, redis: Redis) -> None:
    tokens = prompt(100)
    await cluster.generate(tokens)
    old = cluster.prefill.parts
    assert old is not None
    await order(cluster.prefill, Role.DECODE)
    await changed(redis, cluster.prefill, Role.DECODE)
    new = cluster.prefill.parts
    assert new is not None
    chain = chain_hashes(root_hash(new.model.fingerprint, ""), tokens, BLOCK)
    lives = [(old.worker_id, old.epoch), (new.worker_id, new.epoch)]
    index = PrefixIndex(redis)
    await until(lambda: holds(index, lives, [0, len(chain)]))


async def test_running_answers_that_do_not_end_in_time_are_given_back_to_move(
    cluster: Split, redis: Redis, reference: Reference
) -> None:
    """What came before is right and the rest can be computed elsewhere; no block stays held."""
    prompts = [prompt(40, seed=seed) for seed in range(4)]
    tasks = [
        asyncio.create_task(cluster.generate(tokens, PlanKind(kind), max_tokens=400))
        for tokens, kind in zip(prompts, ["local", "remote"] * 2, strict=True)
    ]
    samples = tuple(map(Sample, range(3)))
    shared = [
        asyncio.create_task(cluster.generate_all(prompts[0], PlanKind.LOCAL, samples, max_tokens=400, **more))
        for more in ({"temperature": 1.0}, {"beam": BeamParams(4, early_stopping="never"), "logprobs": 8})
    ]
    await until(lambda: min(cluster.decode.counters()[name] / 20 for name in ("generation_tokens", "forks")) >= 1)
    await order(cluster.decode, Role.PREFILL, drain_s=0.0)
    answers: list[Answer] = await asyncio.gather(*tasks)
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer.error == Unavailable.type
        num_written = len(answer.token_ids)
        assert num_written
        assert answer.token_ids == await greedy(reference, tokens, num_written)
    for found in await asyncio.gather(*shared):
        assert {answer.error for answer in found.values()} == {Unavailable.type}
    await changed(redis, cluster.decode, Role.PREFILL)
    await cluster.wait_idle()


async def test_samples_that_have_forked_from_their_prompt_are_given_back_too(
    cluster: Split, redis: Redis, reference: Reference
) -> None:
    tokens = prompt(40)
    samples = tuple(Sample(index) for index in range(3))
    task = asyncio.create_task(cluster.generate_all(tokens, PlanKind.LOCAL, samples, max_tokens=400))
    await until(lambda: cluster.decode.counters()["generation_tokens"] >= 12)
    await order(cluster.decode, Role.PREFILL, drain_s=0.0)
    answers = list((await task).values())
    longest = max(len(answer.token_ids) for answer in answers)
    expected = await greedy(reference, tokens, longest)
    for answer in answers:
        assert answer.error == Unavailable.type
        assert answer.token_ids
        assert answer.token_ids == expected[: len(answer.token_ids)]
    await changed(redis, cluster.decode, Role.PREFILL)
    await cluster.wait_idle()


async def test_a_prefill_worker_that_changes_while_it_is_pulled_from_costs_no_token(
    cluster: Split, redis: Redis, reference: Reference
) -> None:
    prompts = [prompt(150, seed=seed) for seed in range(5)]
    tasks = [asyncio.create_task(cluster.generate(tokens)) for tokens in prompts]
    await until(lambda: cluster.prefill.counters()["handovers"] > 0)
    began = [task for task in tasks if not task.done()]
    await order(cluster.prefill, Role.DECODE, drain_s=60.0)
    await changed(redis, cluster.prefill, Role.DECODE)
    assert began
    for tokens, task in zip(prompts, tasks, strict=True):
        assert (await task).token_ids == await greedy(reference, tokens, 8)


async def test_orders_of_an_earlier_epoch_or_a_lower_number_are_refused(cluster: Split, redis: Redis) -> None:
    assert cluster.prefill.parts is not None
    old_epoch = cluster.prefill.parts.epoch
    await order(cluster.prefill, Role.PREFILL, fence=7)  # its own role: nothing to do
    with pytest.raises(StaleEpoch):
        await order(cluster.prefill, Role.DECODE, fence=6)
    await order(cluster.prefill, Role.DECODE, fence=7)
    await changed(redis, cluster.prefill, Role.DECODE)
    with pytest.raises(StaleEpoch):
        await order(cluster.prefill, Role.PREFILL, fence=8, epoch=old_epoch)
    with pytest.raises(StaleEpoch):
        await order(cluster.prefill, Role.PREFILL, fence=6)


async def test_a_worker_starts_again_in_the_role_that_it_took_last(
    model: Path, redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    config = WorkerConfig(
        model=str(model),
        worker_id="prefill-0",
        redis=redis_url,
        cluster_token=TOKEN,
        kv_blocks=64,
        threads=1,
        role_dir=tmp_path,
    )
    async with asyncio.TaskGroup() as group:
        first = Host(config, Role.PREFILL)
        task = await started(first, group)
        await order(first, Role.DECODE)
        await changed(redis, first, Role.DECODE)
        first.stop()
        await task
        second = Host(config, Role.PREFILL)
        await started(second, group)
        assert (await changed(redis, second, Role.DECODE)).worker_id == "prefill-0"
        second.stop()

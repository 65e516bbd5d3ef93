"""Blocks that one worker holds are pulled by another instead of computed, and the tokens stay the same."""

import asyncio
import logging
import random
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from common.messages import PlanKind, Role
from kvstore.pull_meter import PullMeter
from tests.support.fleet import Fleet, fleet, held_by
from tests.support.reference import Reference
from tests.support.split import Answer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def workers(model: Path, redis_url: str) -> AsyncIterator[Fleet]:
    async with fleet(str(model), redis_url, prefills=2, decodes=2) as running:
        yield running


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(3, 200), k=length)


async def check(answer: Answer, reference: Reference, tokens: list[int], num_tokens: int = 8) -> None:
    assert answer.error is None
    assert answer.token_ids == await reference.greedy_aside(tokens, num_tokens)


async def test_tokens_are_equal_in_miss_partial_hit_full_hit_and_peer_hit(workers: Fleet, reference: Reference):
    first, second = workers.pair(0, 0), workers.pair(1, 1)
    tokens = prompt(100)
    longer = tokens + prompt(41, seed=1)
    await check(await first.generate(tokens), reference, tokens)  # miss
    full = await first.generate(tokens)
    await check(full, reference, tokens)
    assert full.started_cached == 96
    partial = await first.generate(longer)
    await check(partial, reference, longer)
    assert partial.started_cached == 96
    before = second.prefill.counters()["prompt_tokens_computed"]
    peer = await second.generate(longer, peer=held_by(first.prefill, Role.PREFILL, 128))
    await check(peer, reference, longer)
    assert peer.started_cached == 128
    counters = second.prefill.counters()
    assert counters["prompt_tokens_computed"] - before == 141 - 128
    assert counters["prefix_cache_hits"] == counters["prefix_cache_hits_peer"] == 128
    assert counters["prefix_cache_queries"] == 141


async def test_a_decode_worker_pulls_for_a_local_plan(workers: Fleet, reference: Reference):
    pair = workers.pair(0, 0)
    tokens = prompt(100)
    await check(await pair.generate(tokens), reference, tokens)
    other = workers.pair(0, 1)
    answer = await other.generate(tokens, PlanKind.LOCAL, peer=held_by(pair.prefill, Role.PREFILL, 96))
    await check(answer, reference, tokens)
    assert answer.started_cached == 96
    assert other.decode.counters()["prefix_cache_hits_peer"] == 96
    assert other.decode.counters()["prompt_tokens_computed"] == 4


async def test_generated_tokens_of_a_decode_worker_count_too(workers: Fleet, reference: Reference):
    tokens = prompt(40)
    first = await workers.pair(0, 0).generate(tokens, PlanKind.LOCAL, max_tokens=60)
    turn = tokens + first.token_ids + prompt(9, seed=2)  # 99 of the 100 tokens before have their KV there
    answer = await workers.pair(1, 1).generate(turn, peer=held_by(workers.decodes[0], Role.DECODE, 96))
    await check(answer, reference, turn)
    assert answer.started_cached == 96
    assert workers.prefills[1].counters()["prefix_cache_hits_decode"] == 96


async def test_sixteen_at_once_fetch_a_prefix_once(workers: Fleet, reference: Reference):
    first, second = workers.pair(0, 0), workers.pair(1, 1)
    tokens = prompt(100)
    await first.generate(tokens)
    hint = held_by(first.prefill, Role.PREFILL, 96)
    answers = await asyncio.gather(*(second.generate(tokens, peer=hint) for _ in range(16)))
    for answer in answers:
        await check(answer, reference, tokens)
    assert second.prefill.parts is not None
    assert second.prefill.parts.fetcher.num_fetched_tokens == 96
    assert second.prefill.counters()["prompt_tokens_computed"] == 16 * 4


@pytest.mark.parametrize("wrong", ["address", "epoch", "num_tokens"])
async def test_a_wrong_hint_costs_a_recomputation_and_nothing_else(workers: Fleet, reference: Reference, wrong: str):
    first, second = workers.pair(0, 0), workers.pair(1, 1)
    tokens = prompt(100)
    hint = held_by(first.prefill, Role.PREFILL, 96)  # which holds nothing of it: an index that is behind
    changes = {"address": "127.0.0.1:1", "epoch": 1, "num_tokens": 10**6}
    hint = msgspec.structs.replace(hint, **{wrong: changes[wrong]})
    answer = await second.generate(tokens, peer=hint)
    await check(answer, reference, tokens)
    assert answer.started_cached == 0


async def test_what_another_salt_holds_is_not_lent(workers: Fleet, reference: Reference):
    first, second = workers.pair(0, 0), workers.pair(1, 1)
    tokens = prompt(100)
    await first.generate(tokens, salt="a")
    answer = await second.generate(tokens, salt="b", peer=held_by(first.prefill, Role.PREFILL, 96))
    await check(answer, reference, tokens)
    assert answer.started_cached == 0


async def test_a_chat_of_eight_turns_computes_each_token_once_whoever_serves(
    model: Path, redis_url: str, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    """Turns move over all four workers; the deepest holder is the hint, as the gateway's index would say.

    A tiny model computes about as fast as blocks move, so which is faster here says nothing: fetching is.
    """
    monkeypatch.setattr(PullMeter, "is_cheaper", lambda *_: True)
    history = prompt(70)
    num_new, holder = 70, None
    async with fleet(str(model), redis_url, prefills=2, decodes=2, block_size=4, kv_blocks=1024) as workers:
        for turn in range(8):
            # the decode worker of the turn before holds everything but the last token that it wrote
            hint = None if holder is None else held_by(workers.decodes[holder], Role.DECODE, len(history))
            kind = PlanKind.LOCAL if turn % 3 == 2 else PlanKind.REMOTE
            holder = (turn // 2) % 2
            answer = await workers.pair(turn % 2, holder).generate(history, kind, peer=hint)
            await check(answer, reference, history)
            if turn < 7:
                history = history + answer.token_ids + prompt(40, seed=100 + turn)
                num_new += len(answer.token_ids) + 40
        computed = workers.computed()
        logging.getLogger(__name__).info("computed %d of %d new tokens: %.3f", computed, num_new, computed / num_new)
        assert computed <= 1.1 * num_new

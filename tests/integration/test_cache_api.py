"""A gateway and real workers on a tiny model: usage, /v1/cache/ and tenancy, end to end in one process."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from common.errors import ConfigError
from common.ids import BlockHash, BlockId, Epoch, WorkerId
from compose.cache_view import lookup_table, stats_table, top_table
from gateway.pinned_file import read_pinned
from kvstore.block_pool import BlockPool
from kvstore.prefix_index import PrefixIndex, PrefixIndexWriter
from tests.support.fleet import Fleet, fleet
from tests.support.gateway_bench import Bench, open_bench
from tests.support.split import TOKEN
from tests.support.stub_decode import MODEL

pytestmark = pytest.mark.anyio

BLOCK = 16


@pytest.fixture
async def workers(model: Path, redis_url: str) -> AsyncIterator[Fleet]:
    async with fleet(str(model), redis_url, prefills=1, decodes=1, served_model_name=MODEL) as running:
        yield running


@pytest.fixture
async def bench(workers: Fleet, model: Path, redis: Redis, redis_url: str, tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(redis, redis_url, tmp_path) as opened:
        await opened.gateway(model, cluster_token=TOKEN, local_prefill_tokens=24, prefill_expected=True)
        await opened.wait_workers(2)
        yield opened


def prompt(length: int, first: int = 3) -> list[int]:
    return [first + (7 * at) % 150 for at in range(length)]


async def complete(bench: Bench, token_ids: list[int], **fields: Any) -> tuple[int, str]:
    answer = await bench.complete(token_ids, max_tokens=4, temperature=0, ignore_eos=True, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"], answer.headers["x-baton-route"]


async def stats(bench: Bench, **query: str) -> dict[str, Any]:
    return (await bench.client.get("/v1/cache/stats", params=query)).json()


async def wait_indexed(
    bench: Bench, token_ids: list[int], cached: int, *, holders: int = 1, **fields: Any
) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def is_there() -> bool:
        answer = await bench.client.post("/v1/cache/lookup", json={"prompt": token_ids} | fields)
        found.update(answer.json())
        return found["cached_tokens"] == cached and (not cached or len(found["workers"]) >= holders)

    await bench.wait_until(is_there)
    return found


async def wait_queries(bench: Bench, queries: int) -> dict[str, Any]:
    """Records are published every second, so counts come a little later."""
    found: dict[str, Any] = {}

    async def is_there() -> bool:
        found.update(await stats(bench))
        return found["queries_tokens"] == queries

    await bench.wait_until(is_there)
    return found


async def test_usage_and_statistics_tell_the_same_story(bench: Bench):
    shared, length = prompt(100), 100 + 40
    assert (await complete(bench, shared + prompt(40, 60)))[0] == 0
    held = await wait_indexed(bench, shared + prompt(40, 70), 96, holders=2)
    assert {worker["worker"] for worker in held["workers"]} == {"prefill-0", "decode-0"}
    cached, route = await complete(bench, shared + prompt(40, 70))
    assert cached == 96
    assert "cached=96" in route
    found = await wait_queries(bench, 2 * length)
    assert (found["hit_tokens"], found["hit_rate"]) == (96, round(96 / (2 * length), 6))
    assert sum(found["by_source"].values()) == 96
    assert sum(counts["queries_tokens"] for counts in found["by_role"].values()) == 2 * length
    assert found["blocks"]["indexed"] > 0
    assert found["saved_prefill_seconds"] > 0
    assert stats_table(found).row_count == 1 + 2 + 2
    one = await stats(bench, worker="prefill-0", window="1h")
    assert [worker["worker"] for worker in one["by_worker"]] == ["prefill-0"]
    hits = 0.0
    for role in ("prefill", "decode"):
        for source in ("local", "peer", "decode"):
            hits += await bench.metric("baton_cache_hit_tokens_total", role=role, source=source)
    assert hits == 96


async def test_the_next_turn_of_a_chat_is_computed_by_the_decode_worker_that_holds_it(bench: Bench, workers: Fleet):
    history = prompt(100)
    answer = (
        await bench.complete(history, max_tokens=13, temperature=0, ignore_eos=True, return_token_ids=True)
    ).json()
    history += answer["choices"][0]["token_ids"]
    turn = history + prompt(30, 60)
    await wait_indexed(bench, turn, 112)
    before = workers.prefills[0].counters()["prompt_tokens_computed"]
    cached, route = await complete(bench, turn)
    assert cached == 112  # 100 of the prompt and 12 of the 13 that were written: the last one's KV was never needed
    assert route.startswith("local")
    assert route.endswith("reason=cached")
    assert workers.prefills[0].counters()["prompt_tokens_computed"] == before
    found = await wait_queries(bench, 100 + 143)
    assert found["by_source"] == {"local": 0, "peer": 0, "decode": 112}


async def test_salts_share_nothing_and_see_nothing_of_each_other(bench: Bench):
    tokens = prompt(120)
    for salt in ({}, *({"cache_salt": f"tenant {number}"} for number in range(5))):
        assert (await complete(bench, tokens, **salt))[0] == 0
    await wait_indexed(bench, tokens, 112, cache_salt="tenant 1")
    assert (await complete(bench, tokens, cache_salt="tenant 1"))[0] == 112
    stranger = await bench.client.post("/v1/cache/lookup", json={"prompt": tokens, "cache_salt": "stranger"})
    assert stranger.json()["cached_tokens"] == 0


async def test_shared_prefixes_are_listed_with_their_words_and_holders(bench: Bench):
    system = "You are a pirate. " * 10
    for question in ("one?", "two?", "three?"):
        answer = await bench.client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
                "max_tokens": 2,
            },
        )
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert (cached > 0) == (question != "one?")
        await bench.wait_until(lambda: _is_indexed(bench, system))
    answer = (await bench.client.get("/v1/cache/prefixes", params={"top": 5})).json()
    (prefix,) = answer["prefixes"]
    assert "You are a pirate." in prefix["first_words"]
    assert (prefix["requests"], prefix["hit_rate"]) == (3, round(2 / 3, 6))
    assert prefix["saved_tokens"] == 2 * prefix["tokens"]
    assert set(prefix["holders"]) == {"decode-0", "prefill-0"}
    assert top_table(answer).row_count == 1


async def _is_indexed(bench: Bench, system: str) -> bool:
    body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "four?"}]}
    answer = (await bench.client.post("/v1/cache/lookup", json=body)).json()
    return len(lookup_table(answer).rows) == 2


async def test_after_a_reset_nothing_is_cached_anywhere(bench: Bench):
    tokens = prompt(120)
    await complete(bench, tokens)
    await wait_indexed(bench, tokens, 112)
    answer = (await bench.client.post("/v1/cache/reset")).json()
    assert sorted(answer["workers"]) == ["decode-0", "prefill-0"]
    assert answer["failed"] == {}
    await wait_indexed(bench, tokens, 0)
    assert (await complete(bench, tokens))[0] == 0


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/cache/stats?window=2m", "window"),
        ("/v1/cache/stats?worker=nobody", "worker"),
        ("/v1/cache/prefixes?top=0", "top"),
        ("/v1/cache/prefixes?top=x", "top"),
    ],
)
async def test_a_wrong_question_is_named(bench: Bench, path: str, param: str):
    answer = await bench.client.get(path)
    assert answer.status_code == (404 if param == "worker" else 400)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    "body", [{}, {"prompt": "a", "messages": []}, {"prompt": [10**9]}, {"prompt": "a", "cache_salt": "x" * 129}]
)
async def test_a_wrong_lookup_is_refused(bench: Bench, body: dict[str, Any]):
    answer = await bench.client.post("/v1/cache/lookup", json=body)
    assert answer.status_code == 400, answer.text


def _num_kept(pool: BlockPool) -> int:
    return pool.counts().total - pool.num_available


async def test_pinned_prefixes_are_warmed_kept_under_pressure_and_kept_again_by_a_new_life(
    model: Path, redis: Redis, redis_url: str, tmp_path: Path
):
    system = "You are a pirate who answers in rhymes. " * 3
    pins = tmp_path / "pins.jsonl"
    pins.write_text(json.dumps({"name": "pirate", "system": system}) + "\n\n")
    body = {"messages": [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]}
    async with open_bench(redis, redis_url, tmp_path) as bench:

        async def held() -> int:
            return int((await bench.client.post("/v1/cache/lookup", json=body)).json()["cached_tokens"])

        await bench.gateway(model, is_ready=False, cluster_token=TOKEN, pin_prefix=pins)
        for _ in range(2):  # the second time with other lives of the workers, whose caches are empty
            async with fleet(
                str(model), redis_url, prefills=1, decodes=1, served_model_name=MODEL, kv_blocks=40
            ) as workers:
                await bench.wait_workers(2)
                await bench.wait_until(held)
                pinned = await held()
                for number in range(6):
                    assert (await complete(bench, prompt(400, first=3 + number)))[0] == 0
                for host in (*workers.prefills, *workers.decodes):
                    assert host.parts is not None
                    assert host.parts.model.pool.num_evictions > 0
                    pool = host.parts.model.pool
                    # an answer's last blocks leave a moment after it
                    await bench.wait_until(lambda pool=pool, kept=pinned // BLOCK: _num_kept(pool) == kept)
                assert await held() == pinned


@pytest.mark.parametrize(
    "line", ["[]", '{"name": "a"}', '{"name": "a", "system": "b", "prompt": "c"}', '{"name": "a", "sytem": "b"}']
)
def test_a_wrong_line_of_pinned_prefixes_is_named_at_the_start(tmp_path: Path, line: str):
    pins = tmp_path / "pins.jsonl"
    pins.write_text('{"name": "good", "prompt": "x"}\n' + line)
    with pytest.raises(ConfigError, match="line 2"):
        read_pinned(pins)


async def test_a_killed_workers_entries_are_gone_with_its_record(model: Path, redis: Redis, redis_url: str):
    """Nothing withdraws them, as after SIGKILL; what is left of the index is what the others hold."""
    async with fleet(str(model), redis_url, prefills=2, decodes=1) as workers:
        await workers.pair(0, 0).generate(prompt(100))
        parts = [host.parts for host in (*workers.prefills, *workers.decodes)]
        lives = [(one.worker_id, one.epoch) for one in parts if one is not None]
        index = PrefixIndex(redis)
        async with asyncio.timeout(20):
            while await index.sizes(lives) != [6, 0, 6]:  # noqa: ASYNC110 - seen from outside
                await asyncio.sleep(0.01)
        writer = PrefixIndexWriter(redis, WorkerId("killed"), Epoch(1))  # published once and never renewed
        await writer.rewrite({BlockHash(bytes([n]) * 16): BlockId(n) for n in range(100)})
        async with asyncio.timeout(20):
            while await redis.keys("baton:prefix:killed:*"):  # noqa: ASYNC110 - it expires
                await asyncio.sleep(0.05)
        assert await index.sizes(lives) == [6, 0, 6]  # those who live have renewed theirs meanwhile

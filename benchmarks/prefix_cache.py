"""What the prefix cache is worth: the time to a first token behind a shared prompt, and hit rates over a trace.

    python -m benchmarks.prefix_cache ttft [--pairs 10]      starts `baton up` with the small model
    python -m benchmarks.prefix_cache curve [--trace FILE] [--plot FILE.png]

``ttft``: each pair is a new 1,500-token system prompt, asked twice with another question; both times from one run.

``curve``: replays a trace in the Mooncake form through the real router, block pools, tables, retention and index rule,
without a model and without a clock: 2 prefill and 2 decode workers, each with a pool of the given share of the trace's
working set (all its distinct blocks). A worker that lacks what another holds pulls it. The oracle is one cache that
forgets nothing.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
from rich.console import Console
from rich.table import Table

from benchmarks.mooncake_trace import Request, generate, read
from common.ids import BlockHash, Epoch, WorkerId
from common.messages import Fingerprint, Role, SlotCounts, WorkerLoad, WorkerRecord, WorkerState
from gateway.router import ClusterView, RouterLimits, WorkerView, choose_decode, choose_plan
from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockTable
from kvstore.closed_prefixes import ClosedPrefixes
from kvstore.prefix_hash import PrefixHasher, chain_hashes, root_hash
from kvstore.retention import LeastRecentlyUsed
from tests.support.cluster import running_cluster

BLOCK_SIZE = 16
FINGERPRINT = Fingerprint("model", "tokenizer", "shape", "float32", "none", BLOCK_SIZE, "v1")
ROOT = root_hash(FINGERPRINT, "")
LIMITS = RouterLimits(local_prefill_tokens=64, max_prefill_wait_s=20.0, max_tick_age_s=10.0)
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)
SYSTEM_TOKENS, QUESTION_TOKENS = 1500, 32
FIRST_OUTPUT_ID = 2**31


# ---- the curve ----


class SimWorker:
    """One worker's cache, without its model."""

    def __init__(self, name: str, role: Role, num_blocks: int) -> None:
        self.name = WorkerId(name)
        self.role = role
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, LeastRecentlyUsed(num_blocks // 2))
        self.index = ClosedPrefixes()

    def view(self) -> WorkerView:
        """Return what a gateway would know of it."""
        record = WorkerRecord(
            worker_id=self.name,
            role=self.role,
            epoch=Epoch(1),
            pid=1,
            address=self.name,
            state=WorkerState.READY,
            device="cpu",
            fingerprint=FINGERPRINT,
            model="model",
            max_model_len=10**6,
            load=WorkerLoad(0, 0, 0, 2_000.0, 0.0, 40_000.0),
            blocks=self.pool.counts(),
            slots=SlotCounts(0, 0),
            counters={},
        )
        return WorkerView(record, 0.0, True, 0, 0)

    def depth(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks the index would name here."""
        self.index.apply(self.pool.drain_cache_events().events)
        return self.index.depth(chain)

    def serve(self, token_ids: list[int]) -> None:
        """Hold all of ``token_ids`` once, and let them go."""
        table = BlockTable(self.pool, PrefixHasher(ROOT, BLOCK_SIZE))
        table.adopt_prefix(token_ids)
        if table.blocks_needed(len(token_ids)) <= self.pool.num_available:
            table.grow(len(token_ids))
            table.publish(token_ids, len(token_ids))
        table.release()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a replay found."""

    hit_tokens: int
    peer_tokens: int
    """Of those, the ones that another worker held."""
    evictions: int


class Replay:
    """A cluster of simulated workers and a trace."""

    def __init__(self, num_blocks: int) -> None:
        roles = [(Role.PREFILL, 0), (Role.PREFILL, 1), (Role.DECODE, 0), (Role.DECODE, 1)]
        self.workers = {
            worker.name: worker for worker in (SimWorker(f"{role}-{n}", role, num_blocks) for role, n in roles)
        }
        self._draw = random.Random(0)

    def run(self, trace: Sequence[Request]) -> Outcome:
        """Serve all of ``trace`` in order."""
        hits = peer_hits = 0
        for number, request in enumerate(trace):
            own, lent = self._serve(request.token_ids(), request.output_length, number)
            hits += own + lent
            peer_hits += lent
        return Outcome(hits, peer_hits, sum(worker.pool.num_evictions for worker in self.workers.values()))

    def _serve(self, token_ids: list[int], num_output: int, number: int) -> tuple[int, int]:
        chain = chain_hashes(ROOT, token_ids, BLOCK_SIZE)[: (len(token_ids) - 1) // BLOCK_SIZE]
        depths = {name: worker.depth(chain) * BLOCK_SIZE for name, worker in self.workers.items()}
        resident = {name: depth for name, depth in depths.items() if depth}
        view = ClusterView([worker.view() for worker in self.workers.values()], 0.0, True)
        decode = choose_decode(view, len(token_ids), limits=LIMITS, resident=resident, draw=self._draw.random())
        assert decode is not None
        plan = choose_plan(
            view,
            decode,
            num_tokens=len(token_ids),
            cached_tokens=depths[decode.worker_id],
            limits=LIMITS,
            resident=resident,
            draw=self._draw.random(),
        )
        computing = plan.prefill.worker_id if plan.prefill is not None else decode.worker_id
        own = depths[computing]
        lent = max(0, min(plan.peer.num_tokens // BLOCK_SIZE, len(chain)) * BLOCK_SIZE - own) if plan.peer else 0
        self.workers[computing].serve(token_ids)
        answer = [FIRST_OUTPUT_ID + number * 1000 + at for at in range(num_output - 1)]
        self.workers[decode.worker_id].serve(token_ids + answer)
        return own, lent


def oracle(trace: Sequence[Request]) -> tuple[int, int]:
    """Return the tokens that a cache which forgets nothing would hit, and its blocks at the end."""
    known: set[BlockHash] = set()
    hits = 0
    for request in trace:
        token_ids = request.token_ids()
        chain = chain_hashes(ROOT, token_ids, BLOCK_SIZE)
        usable = chain[: (len(token_ids) - 1) // BLOCK_SIZE]
        hits += BLOCK_SIZE * next((at for at, one in enumerate(usable) if one not in known), len(usable))
        known.update(chain)
    return hits, len(known)


def curve(trace: Sequence[Request], plot: Path | None) -> Table:
    """Return the table of hit rates by size of the pools."""
    num_tokens = sum(request.input_length for request in trace)
    best, working_set = oracle(trace)
    table = Table(
        title=f"{len(trace)} prompts, {num_tokens} tokens, working set {working_set} blocks; "
        f"oracle hits {100 * best / num_tokens:.1f} %"
    )
    for name in ("pool of each worker", "blocks", "hit rate %", "of the oracle %", "from a peer %", "evictions"):
        table.add_column(name, justify="right")
    points = []
    for share in SHARES:
        num_blocks = max(1, int(working_set * share))
        found = Replay(num_blocks).run(trace)
        points.append((share, found.hit_tokens / num_tokens))
        table.add_row(
            f"{100 * share:.0f} %",
            str(num_blocks),
            f"{100 * found.hit_tokens / num_tokens:.1f}",
            f"{100 * found.hit_tokens / best:.1f}",
            f"{100 * found.peer_tokens / num_tokens:.1f}",
            str(found.evictions),
        )
    if plot is not None:
        _plot(points, best / num_tokens, plot)
    return table


def _plot(points: Sequence[tuple[float, float]], best: float, path: Path) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(6, 4))).subplots()
    axes.plot([100 * share for share, _ in points], [100 * rate for _, rate in points], marker="o", label="Baton")
    axes.axhline(100 * best, linestyle="--", color="grey", label="cache that forgets nothing")
    axes.set(xlabel="pool of each worker, % of the working set", ylabel="hit rate, %", ylim=(0, 100))
    axes.legend()
    figure.savefig(path)


# ---- the time to the first token ----


async def ttft(url: str, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token of a prompt, and its ``cached_tokens``."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    first, cached = 0.0, -1
    async with httpx2.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client:
        began = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter() - began
                usage = json.loads(line.removeprefix("data: ")).get("usage")
                cached = usage["prompt_tokens_details"]["cached_tokens"] if usage else cached
    return first, cached


async def measure_pairs(url: str, num_pairs: int) -> Table:
    """Return the table of all pairs and their medians."""
    draw = random.Random(1)
    fresh = (draw.randrange(1_000, 40_000) for _ in itertools.count())
    table = Table(title=f"{SYSTEM_TOKENS} shared tokens, {QUESTION_TOKENS} of each question's own")
    for name in ("pair", "cold ms", "warm ms", "warm / cold", "cached cold", "cached warm"):
        table.add_column(name, justify="right")
    await ttft(url, list(itertools.islice(fresh, 600)))  # kernels are compiled, rates measured
    rows = []
    for number in range(num_pairs):
        system = list(itertools.islice(fresh, SYSTEM_TOKENS))
        cold, warm = [await ttft(url, system + list(itertools.islice(fresh, QUESTION_TOKENS))) for _ in range(2)]
        rows.append((cold[0], warm[0]))
        ratio = warm[0] / cold[0]
        table.add_row(
            str(number), f"{cold[0] * 1e3:.0f}", f"{warm[0] * 1e3:.0f}", f"{ratio:.3f}", str(cold[1]), str(warm[1])
        )
    cold_s, warm_s = (statistics.median(column) for column in zip(*rows, strict=True))
    ratio = statistics.median(warm / cold for cold, warm in rows)
    table.add_row("median", f"{cold_s * 1e3:.0f}", f"{warm_s * 1e3:.0f}", f"{ratio:.3f}", "", "")
    return table


def main() -> None:
    """Print one of the two tables."""
    parser = argparse.ArgumentParser(description="What the prefix cache is worth.")
    parser.add_argument("what", choices=("ttft", "curve"))
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    console = Console(width=110)
    if options.what == "curve":
        trace = read(options.trace.read_text().splitlines()) if options.trace else generate()
        console.print(curve(trace, options.plot))
        return
    with tempfile.TemporaryDirectory() as folder, running_cluster(Path(folder), "--prefill", "1") as cluster:
        console.print(asyncio.run(measure_pairs(cluster.url, options.pairs)))


if __name__ == "__main__":
    main()

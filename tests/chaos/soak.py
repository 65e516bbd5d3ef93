"""``python -m tests.chaos.soak``: random faults under concurrent streams for as long as is asked for, then an overload.

Prints a table whose middle columns must read 0, and exits with 1 when they do not. Requests may end with a clean error
(both decode workers gone at once, the client's own gateway killed); a wrong token, a request without an end, and a
block that nobody gives back may not happen.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cluster import Answer, ChaosCluster, chaos_cluster, key_of
from tests.chaos.proxy import FaultProxy, Way
from tests.support.reference import Reference
from tests.support.tiny_models import build

HUNG_S = 120.0
"""A request that has not ended after so long hangs: twice what a gateway allows one, and its slack."""
NUM_TOKENS = 80
NUM_PROMPTS = 40
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PROCESSES = (*WORKERS, "gateway-0", "gateway-1", "redis")
GATEWAYS = ("gateway-0", "gateway-1")

Prompts = list[tuple[tuple[int, ...], list[int]]]


@dataclass(slots=True)
class Counts:
    """What has happened so far."""

    faults: Counter[str] = field(default_factory=Counter)
    requests: int = 0
    whole: int = 0
    left: int = 0
    refused: int = 0
    """429."""
    errors: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    hung: int = 0
    leaked: int = 0


@dataclass(frozen=True, slots=True)
class Options:
    """What is run."""

    minutes: float
    streams: int
    leave: float
    fault_s: float
    """Mean seconds between two faults."""
    overload_s: float
    seed: int


class Soak:
    """One run on one cluster."""

    def __init__(self, cluster: ChaosCluster, prompts: Prompts, options: Options) -> None:
        self.counts = Counts()
        self._cluster = cluster
        self._prompts = prompts
        self._options = options
        self._draw = random.Random(options.seed)

    async def run(self) -> None:
        """Fault for ``minutes``, heal, overload for ``overload_s``, and see that nothing is held."""
        await self._with_clients(self._options.streams, self._break_things(), self._options.minutes * 60)
        self._cluster.heal()
        await self._cluster.wait_ready()
        await self._settle()
        if self._options.overload_s:
            await self._with_clients(4 * self._options.streams, asyncio.sleep(0), self._options.overload_s)
            await self._settle()

    async def _with_clients(self, num_clients: int, beside: Awaitable[None], seconds: float) -> None:
        stop = asyncio.Event()
        clients = [asyncio.create_task(self._client(number, stop)) for number in range(num_clients)]
        other = asyncio.ensure_future(beside)
        await asyncio.sleep(seconds)
        stop.set()
        other.cancel()
        await asyncio.gather(other, return_exceptions=True)
        self._cluster.heal()
        await asyncio.gather(*clients)

    async def _settle(self) -> None:
        try:
            await self._cluster.wait_idle()
        except AssertionError as error:
            sys.stderr.write(f"{error}\n")
            self.counts.leaked += 1

    # ---- clients ----

    async def _client(self, number: int, stop: asyncio.Event) -> None:
        draw = random.Random(f"{self._options.seed}/{number}")
        while not stop.is_set():
            tokens, expected = draw.choice(self._prompts)
            leave_after = draw.randrange(NUM_TOKENS) if draw.random() < self._options.leave else None
            body = {
                "prompt": list(tokens),
                "max_tokens": NUM_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
                "stream": leave_after is not None or draw.random() < 0.7,
            }
            gateway, key = draw.choice(GATEWAYS), key_of(draw.randrange(4))
            self.counts.requests += 1
            try:
                async with asyncio.timeout(HUNG_S):
                    answer = await self._cluster.complete(gateway, body, key=key, leave_after=leave_after)
            except TimeoutError:
                self.counts.hung += 1
                continue
            self._judge(answer, expected, leave_after)
            if answer.error is not None:
                await asyncio.sleep(draw.random())

    def _judge(self, answer: Answer, expected: list[int], leave_after: int | None) -> None:
        counts = self.counts
        if answer.token_ids != expected[: len(answer.token_ids)]:
            counts.wrong += 1
            sys.stderr.write(f"wrong: {answer}\n")
        elif answer.status == 429:
            counts.refused += 1
        elif answer.error is not None:
            counts.errors[answer.error] += 1
        elif leave_after is not None and answer.finish is None:
            counts.left += 1
        elif answer.token_ids == expected and answer.finish == "length" and answer.num_done == 1:
            counts.whole += 1
        else:
            counts.wrong += 1
            sys.stderr.write(f"incomplete: {answer}\n")

    # ---- faults ----

    async def _break_things(self) -> None:
        faults: list[Callable[[], Awaitable[str]]] = [
            self._kill,
            self._freeze,
            self._terminate,
            self._cut,
            self._half_close,
            self._flip,
            self._slow,
            self._drop,
            self._flush,
        ]
        while True:
            await asyncio.sleep(self._draw.expovariate(1 / self._options.fault_s))
            self.counts.faults[await self._draw.choice(faults)()] += 1

    async def _kill(self) -> str:
        self._cluster.send(self._draw.choice(PROCESSES), signal.SIGKILL)
        return "SIGKILL"

    async def _terminate(self) -> str:
        self._cluster.send(self._draw.choice(WORKERS), signal.SIGTERM)
        return "SIGTERM"

    async def _freeze(self) -> str:
        name = self._draw.choice(PROCESSES)
        self._cluster.send(name, signal.SIGSTOP)
        await asyncio.sleep(self._draw.uniform(0.5, 12))
        self._cluster.send(name, signal.SIGCONT)
        return "SIGSTOP"

    async def _cut(self) -> str:
        self._proxy().cut()
        return "cut"

    async def _half_close(self) -> str:
        self._proxy().half_close(self._draw.choice(list(Way)))
        return "half-close"

    async def _flip(self) -> str:
        self._proxy().flip(self._draw.choice(list(Way)), after=self._draw.choice((0, 12, 40, 90, 400)))
        return "flip"

    async def _slow(self) -> str:
        proxy = self._proxy()
        proxy.delay_s = self._draw.choice((0.05, 0.5, 2.0))
        await asyncio.sleep(self._draw.uniform(0.5, 6))
        proxy.heal()
        return "delay"

    async def _drop(self) -> str:
        proxy = self._proxy()
        proxy.is_dropping = True
        await asyncio.sleep(self._draw.uniform(0.5, 8))
        proxy.heal()
        proxy.cut()
        return "drop"

    async def _flush(self) -> str:
        try:
            async with asyncio.timeout(2):
                await self._cluster.redis.flushall()
        except Exception:  # noqa: BLE001 - Redis may be down just now
            return "flush (missed)"
        return "FLUSHALL"

    def _proxy(self) -> FaultProxy:
        proxy = self._cluster.nodes[self._draw.choice((*WORKERS, "redis"))].proxy
        assert proxy is not None
        return proxy


def draw_prompts(model: Path, count: int) -> Prompts:
    """Return prompts of 1 to 1200 tokens with their greedy answers, undisturbed."""
    reference = Reference(model)
    draw = random.Random(7)
    prompts: Prompts = []
    for _ in range(count):
        tokens = draw.choices(range(3, 200), k=draw.choice((1, 15, 16, 17, 60, 200, 600, 1200)))
        prompts.append((tuple(tokens), reference.greedy(tokens, NUM_TOKENS)))
    return prompts


def table(counts: Counts, restarts: int) -> str:
    """Return the result for people."""
    head = ("faults injected", "requests", "wrong tokens", "hung", "leaked blocks", "process restarts")
    row = (sum(counts.faults.values()), counts.requests, counts.wrong, counts.hung, counts.leaked, restarts)
    lines = [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        "| " + " | ".join(map(str, row)) + " |",
        "",
        f"whole {counts.whole}, left by their client {counts.left}, refused with 429 {counts.refused}, "
        f"clean errors {sum(counts.errors.values())}",
        "faults: " + ", ".join(f"{name} {count}" for name, count in sorted(counts.faults.items())),
        *(f"error: {count} x {message}" for message, count in counts.errors.most_common()),
    ]
    return "\n".join(lines) + "\n"


async def soak(options: Options, model: Path, logs: Path) -> bool:
    """Run it; return whether the columns that must be 0 are."""
    async with chaos_cluster(model, logs, ttft_target=10.0) as cluster:
        run = Soak(cluster, draw_prompts(model, NUM_PROMPTS), options)
        await run.run()
        sys.stdout.write(table(run.counts, cluster.num_restarts))
        return run.counts.wrong == run.counts.hung == run.counts.leaked == 0


def main() -> None:
    """Parse the command line, run, and exit with 1 when something was wrong, hung or leaked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--leave", type=float, default=0.2, help="share of clients that leave before the end")
    parser.add_argument("--fault-s", type=float, default=5.0, help="mean seconds between two faults")
    parser.add_argument("--overload-s", type=float, default=60.0, help="seconds of four times the streams at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="folder for the processes' logs; the default is removed at the end")
    given = vars(parser.parse_args())
    with tempfile.TemporaryDirectory(prefix="baton-soak-") as folder:
        model, logs = Path(folder, "model"), given.pop("logs") or Path(folder, "logs")
        logs.mkdir(parents=True, exist_ok=True)
        build("llama", model)
        is_good = asyncio.run(soak(Options(**given), model, logs))
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()

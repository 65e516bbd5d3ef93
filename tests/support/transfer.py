"""Both ends of hand-overs in this process, over real gRPC on loopback, without a model: blocks hold random bytes."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec

import pytest
import torch

from common.ids import BlockId, Epoch, TransferId, WorkerId
from common.messages import Fingerprint, Handover, HelloReply, Offer, Pull, SampledToken
from common.model.spec import LayerSpec
from common.rpc import Handlers, RpcServer
from common.services import HELLO, PULL
from kvstore.block_mover import BlockMover
from kvstore.layout import KvLayout
from kvstore.lease import LeaseTable
from kvstore.outgoing import ReleaseReason
from kvstore.peers import PeerSet
from kvstore.storage import KvStorage
from kvstore.transfer_client import PullOutcome, TransferClient
from kvstore.transfer_server import TransferServer
from kvstore.transports.choices import TransportChoice
from kvstore.transports.lending import Lending
from kvstore.transports.transports import GRPC_ONLY, Transports

TRANSPORTS = [
    "grpc",
    "shm",
    pytest.param("nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="the package nixl is not there")),
]

BLOCK = 4
NUM_BLOCKS = 64
LAYOUT = KvLayout((LayerSpec(2, 3, 5), LayerSpec(1, 7, 2)), BLOCK, torch.bfloat16)
BIG_LAYOUT = KvLayout((LayerSpec(8, 128, 128),) * 8, BLOCK, torch.float32)
"""Blocks of 256 KiB, eight a frame."""
TOKEN = "cluster token"
FINGERPRINT = Fingerprint("model", "tokenizer", "shape", "bfloat16", "none", BLOCK, "layout")
SOURCE_EPOCH = Epoch(1)
PATIENCE_S = 20.0


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def identity(
    name: str, epoch: Epoch, fingerprint: Fingerprint = FINGERPRINT, transports: Transports = GRPC_ONLY
) -> HelloReply:
    return HelloReply(WorkerId(name), epoch, fingerprint, transports.offers())


def new_storage(layout: KvLayout = LAYOUT) -> KvStorage:
    """Return blocks full of random bytes, different in each storage."""
    return lent_storage("grpc", layout)[0]


def lent_storage(transport: TransportChoice, layout: KvLayout = LAYOUT) -> tuple[KvStorage, Transports]:
    """Return such blocks where ``transport`` can read them, and what reads them."""
    device = torch.device("cpu")
    lending = Lending.prepare(transport, device, NUM_BLOCKS, layout.block_bytes)
    storage = KvStorage(layout, NUM_BLOCKS, device, memory=lending.pool_memory)
    storage.write([BlockId(n) for n in range(NUM_BLOCKS)], memoryview(os.urandom(NUM_BLOCKS * layout.block_bytes)))
    return storage, lending.open_transports(storage)


def blocks(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


def handover(transfer_id: str, num_tokens: int, *, has_kv: bool = True) -> Handover:
    return Handover(TransferId(transfer_id), num_tokens, (SampledToken(0, 42),), cached_tokens=0, has_kv=has_kv)


async def until(condition: Callable[[], bool]) -> None:
    """Let the event loop turn until ``condition`` holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event that a test could hold
            await asyncio.sleep(0)


@dataclass(slots=True)
class Source:
    """A worker that lends blocks."""

    storage: KvStorage
    server: TransferServer
    leases: LeaseTable
    clock: Clock
    address: str
    epoch: Epoch
    released: list[tuple[TransferId, ReleaseReason]] = field(default_factory=list)

    def offer(self, transfer_id: str, generation: int = 1) -> Offer:
        return make_offer(transfer_id, self.address, self.epoch, generation)


@asynccontextmanager
async def source(
    *,
    lease_s: float = 30.0,
    layout: KvLayout = LAYOUT,
    epoch: Epoch = SOURCE_EPOCH,
    fingerprint: Fingerprint = FINGERPRINT,
    port: int = 0,
    storage: KvStorage | None = None,
    mover: BlockMover | None = None,
    transport: TransportChoice = "grpc",
    transports: Transports = GRPC_ONLY,
) -> AsyncIterator[Source]:
    """Serve from new blocks, on a virtual clock; nothing is reaped unless the test does it.

    A ``storage`` of the test's own is read by its ``transports``.
    """
    clock, leases = Clock(), LeaseTable(lease_s)
    storage, transports = (storage, transports) if storage else lent_storage(transport, layout)
    released: list[tuple[TransferId, ReleaseReason]] = []
    server = TransferServer(
        storage,
        BLOCK,
        identity("p0", epoch, fingerprint, transports),
        leases,
        lambda transfer_id, reason: released.append((transfer_id, reason)),
        clock,
        mover=mover,
    )
    rpc = RpcServer("127.0.0.1", port, server.handlers(), TOKEN)
    await rpc.start()
    try:
        async with serving(transports):
            yield Source(storage, server, leases, clock, rpc.address, epoch, released)
    finally:
        await rpc.stop(0)


@asynccontextmanager
async def serving(transports: Transports) -> AsyncIterator[None]:
    """Let others read with these transports."""
    running = asyncio.create_task(transports.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


@dataclass(slots=True)
class Destination:
    """A worker that pulls."""

    storage: KvStorage
    client: TransferClient
    peers: PeerSet
    handovers: list[Handover] = field(default_factory=list)

    async def pull(
        self,
        offer: Offer,
        have_tokens: int,
        block_ids: Sequence[BlockId],
        on_handover: Callable[[Handover], None] | None = None,
    ) -> PullOutcome:
        async with asyncio.timeout(PATIENCE_S):
            return await self.client.pull(offer, have_tokens, block_ids, on_handover or self.handovers.append)

    async def say_done(self, offer: Offer) -> None:
        self.client.done(offer)
        await self.told()

    async def say_cancel(self, offer: Offer) -> None:
        self.client.cancel(offer, "not wanted")
        await self.told()

    async def told(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.client.wait_told()


@asynccontextmanager
async def destination(
    *,
    renew_s: float = 5.0,
    idle_s: float = 30.0,
    layout: KvLayout = LAYOUT,
    fingerprint: Fingerprint = FINGERPRINT,
    storage: KvStorage | None = None,
    mover: BlockMover | None = None,
    transport: TransportChoice = "grpc",
    transports: Transports = GRPC_ONLY,
) -> AsyncIterator[Destination]:
    """Pull into new blocks, with the client's background work running; ``transports`` are for a ``storage`` given."""
    peers = PeerSet(TOKEN)
    storage, transports = (storage, transports) if storage else lent_storage(transport, layout)
    client = TransferClient(
        storage,
        BLOCK,
        identity("d0", Epoch(2), fingerprint),
        peers,
        renew_s=renew_s,
        idle_s=idle_s,
        transports=transports,
        mover=mover,
    )
    running = asyncio.create_task(client.run())
    try:
        yield Destination(storage, client, peers)
    finally:
        running.cancel()
        await asyncio.wait([running])
        await peers.close()


def make_offer(transfer_id: str, address: str, epoch: Epoch = SOURCE_EPOCH, generation: int = 1) -> Offer:
    return Offer(TransferId(transfer_id), WorkerId("p0"), epoch, address, generation, 0, Epoch(2))


Script = Callable[[Pull], AsyncIterator[bytes]]


@asynccontextmanager
async def scripted_source(
    script: Script, fingerprint: Fingerprint = FINGERPRINT, transports: Transports = GRPC_ONLY
) -> AsyncIterator[str]:
    """Serve Hello as it should be, and whatever ``script`` yields for a Pull; yields the address."""

    async def hello(_: object) -> HelloReply:
        return identity("p0", SOURCE_EPOCH, fingerprint, transports)

    rpc = RpcServer("127.0.0.1", 0, Handlers({HELLO: hello}, {PULL: script}, {}), TOKEN)
    await rpc.start()
    try:
        async with serving(transports):
            yield rpc.address
    finally:
        await rpc.stop(0)

"""Transports that stand between a test and the real ones, and a source that can be killed."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from common.ids import BlockId, TransferId
from common.messages import KvFrame
from kvstore.transports.choices import TransportChoice
from kvstore.transports.transport import Reader, Transport, TransportFailed
from kvstore.transports.transports import Transports
from tests.support.transfer import BLOCK, blocks, source


@dataclass
class Gate:
    """A transport, and its reader, that lets frames through when a test says so, or fails at one."""

    behind: Transport
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    has_frame: asyncio.Event = field(default_factory=asyncio.Event)
    fails_at: int | None = None
    """Number of the frame that cannot be had."""
    reader: Reader | None = None

    @property
    def name(self) -> str:
        return self.behind.name

    async def run(self) -> None:
        await self.behind.run()

    def offer(self) -> bytes:
        return self.behind.offer()

    def connect(self, detail: bytes) -> "Gate":
        self.reader = self.behind.connect(detail)
        return self

    async def fill(self, frame: KvFrame, block_ids: Sequence[BlockId]) -> None:
        self.has_frame.set()
        if frame.seq == self.fails_at:
            raise TransportFailed("the cable is out")
        await self.may_read.wait()
        assert self.reader is not None
        await self.reader.fill(frame, block_ids)


def gated(transports: Transports, fails_at: int | None = None) -> tuple[Transports, Gate]:
    """Return ``transports``, of which there is one, behind a gate; one that fails is open otherwise."""
    gate = Gate(transports.own[0], fails_at=fails_at)
    if fails_at is not None:
        gate.may_read.set()
    return Transports((gate,)), gate


@dataclass(frozen=True)
class SourceProcess:
    """A source in a process of its own, with one open transfer."""

    process: asyncio.subprocess.Process
    address: str
    content: bytes
    """Of the blocks that are ready."""


@asynccontextmanager
async def source_process(
    transport: TransportChoice, transfer_id: TransferId, num_blocks: int, num_ready: int
) -> AsyncIterator[SourceProcess]:
    """Open a transfer of the first blocks in a new process; it is killed at the end, if not before."""
    arguments = (transport, transfer_id, str(num_blocks), str(num_ready))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.support.transports", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        address, content = (await process.stdout.readline()).decode().split()
        yield SourceProcess(process, address, bytes.fromhex(content))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _lend(transport: TransportChoice, transfer_id: TransferId, num_blocks: int, num_ready: int) -> None:
    async with source(transport=transport) as origin:
        block_ids = blocks(*range(num_blocks))
        origin.server.open(transfer_id, block_ids).advance(num_ready * BLOCK)
        sys.stdout.write(f"{origin.address} {origin.storage.read(block_ids[:num_ready]).hex()}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    _transport, _transfer_id, _num_blocks, _num_ready = sys.argv[1:]
    asyncio.run(_lend(_transport, TransferId(_transfer_id), int(_num_blocks), int(_num_ready)))  # type: ignore[arg-type]

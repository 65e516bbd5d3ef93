"""Reads blocks by id with NIXL: over RDMA, NVLink, CUDA IPC or shared memory, whatever its backend UCX finds.

The pool is registered once. A reader has two lists: every block of the source, and the slots of a *landing*, memory of
the reader's own. A READ goes from block ids into a landing; there it is checked, and only then copied into blocks. So a
READ that is given up, or ends late, or brings wrong bytes, has touched nobody's blocks: its landing is set aside until
NIXL has let go of it.
"""

import asyncio
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from common.errors import CorruptFrame, InvalidRequest
from common.ids import BlockId
from common.messages import KvFrame
from common.wire import decode, encode
from kvstore.block_mover import BlockMover
from kvstore.frame_size import blocks_in_frame
from kvstore.incoming import check_bytes
from kvstore.storage import KvStorage
from kvstore.transports.nixl_agent import NixlAgent, place
from kvstore.transports.transport import TransportFailed

NAME = "nixl"

READ_TIMEOUT_S = 10.0
"""A READ that takes longer is given up, and the transport with it."""

MAX_LANDINGS = 4
"""Frames of one source that are read at a time."""

PROGRESS_S = 0.001
"""How often an agent does what others wait for."""

_EAGER_S = 0.002
"""A READ is asked for its state at every turn of the event loop for so long, then every millisecond."""


class _Detail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: bytes
    """NIXL's own, of the source's agent."""
    memory: str
    address: int
    device: int
    num_blocks: int
    block_bytes: int


class NixlTransport:
    """One agent for all that this worker lends and reads. Used on the event loop."""

    name = NAME

    def __init__(self, storage: KvStorage) -> None:
        """Register the blocks of ``storage``; raises TransportFailed when the package or the backend is missing."""
        self.storage = storage
        self.mover = BlockMover.for_device(storage.device)
        self.agent = NixlAgent("DRAM" if storage.device.type == "cpu" else "VRAM")
        self._registered = self.agent.register(storage.blocks)
        self._readers: weakref.WeakValueDictionary[str, NixlReader] = weakref.WeakValueDictionary()

    async def run(self) -> None:
        """Let others connect and read, until cancelled."""
        while True:
            self.agent.progress()
            await asyncio.sleep(PROGRESS_S)

    def offer(self) -> bytes:
        """Return the agent's metadata, and where the blocks are."""
        address, _, device = place(self.storage.blocks)
        return encode(_Detail(self.agent.metadata(), self.agent.memory, address, device, *self.storage.blocks.shape))

    def connect(self, detail: bytes) -> "NixlReader":
        """Return a reader of another agent's blocks, the same as long as there is one; raises TransportFailed."""
        try:
            found: _Detail = decode(detail, _Detail)
        except InvalidRequest as error:
            raise TransportFailed(error.message) from error
        if found.block_bytes != self.storage.layout.block_bytes:
            raise TransportFailed(f"its blocks have {found.block_bytes} bytes")
        if found.memory != self.agent.memory:
            raise TransportFailed(f"its blocks are in {found.memory} and ours in {self.agent.memory}")
        agent_name = self.agent.add_source(found.metadata)
        reader = self._readers.get(agent_name)
        if reader is None:
            reader = self._readers[agent_name] = NixlReader(self, agent_name, found)
        return reader


@dataclass(frozen=True, slots=True)
class _Landing:
    """Registered memory for one frame."""

    blocks: Tensor
    """``[blocks_in_frame, block_bytes]`` uint8, on the storage's device."""
    registered: Any
    slots: Any
    """NIXL's prepared list of them."""


class NixlReader:
    """Reads the blocks of one source. Owned by whoever pulls from it; without an owner it disconnects."""

    name = NAME

    def __init__(self, transport: NixlTransport, agent_name: str, source: _Detail) -> None:
        self._storage = transport.storage
        self._mover = transport.mover
        self._agent = transport.agent
        self._num_blocks = source.num_blocks
        self._source = self._agent.source_blocks(
            agent_name, source.address, source.device, source.num_blocks, source.block_bytes
        )
        self._free: list[_Landing] = []
        self._landings = asyncio.Semaphore(MAX_LANDINGS)
        self._set_aside: list[tuple[Any, _Landing]] = []
        weakref.finalize(self, self._agent.remove_source, agent_name).atexit = False

    async def fill(self, frame: KvFrame, block_ids: Sequence[BlockId]) -> None:
        """See :class:`kvstore.transports.transport.Reader`; a byte is checked before it is written."""
        if not all(0 <= block_id < self._num_blocks for block_id in frame.block_ids):
            raise CorruptFrame(f"frame {frame.seq} names a block that does not exist")
        async with self._landings:
            landing = await self._read(frame.block_ids)
            try:
                await self._mover.run(partial(self._check_and_write, frame, landing, block_ids))
            finally:
                self._free.append(landing)

    async def _read(self, source_ids: Sequence[BlockId]) -> _Landing:
        """Return a landing that these blocks are in; whatever goes wrong, it is set aside."""
        landing = self._take_landing()
        request = self._agent.begin_read(self._source, source_ids, landing.slots)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                await self._wait_read(request)
            self._agent.end(request)
        except TimeoutError:
            self._set_aside.append((request, landing))
            raise TransportFailed(f"a read took longer than {READ_TIMEOUT_S:g} s") from None
        except BaseException:
            self._set_aside.append((request, landing))
            raise
        return landing

    async def _wait_read(self, request: Any) -> None:
        is_done = self._agent.transfer(request)
        eager_until = time.monotonic() + _EAGER_S
        while not is_done:
            await asyncio.sleep(0 if time.monotonic() < eager_until else 0.001)
            is_done = self._agent.is_done(request)

    def _check_and_write(self, frame: KvFrame, landing: _Landing, block_ids: Sequence[BlockId]) -> None:
        landed = landing.blocks[: len(block_ids)]
        check_bytes(frame, (self._storage.host_bytes(landed),))
        self._storage.scatter(landed, block_ids)

    # ---- landings ----

    def _take_landing(self) -> _Landing:
        self._set_aside = [one for one in self._set_aside if not self._is_let_go(*one)]
        return self._free.pop() if self._free else self._new_landing()

    def _new_landing(self) -> _Landing:
        block_bytes = self._storage.layout.block_bytes
        shape = (blocks_in_frame(block_bytes), block_bytes)
        blocks = torch.empty(shape, dtype=torch.uint8, device=self._storage.device)
        return _Landing(blocks, self._agent.register(blocks), self._agent.own_blocks(blocks))

    def _is_let_go(self, request: Any, landing: _Landing) -> bool:
        """Try to end a READ that was given up; its memory is given back once nothing can write to it."""
        try:
            self._agent.end(request)
        except TransportFailed:
            return False
        landing.slots.release()
        self._agent.deregister(landing.registered)
        return True

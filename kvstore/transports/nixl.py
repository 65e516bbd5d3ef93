"""Reads blocks by id with NIXL: over RDMA, NVLink, CUDA IPC or shared memory, whatever its backend UCX finds.

The pool is registered once. A reader has two lists of descriptors: every block of the source, and the slots of a
*landing*, memory of the reader's own. A READ goes from block ids into a landing; there it is checked, and only then
copied into blocks. So a READ that is given up, or ends late, or brings wrong bytes, has touched nobody's blocks: its
landing is set aside until NIXL has let go of it.

The package ``nixl`` is optional and loaded here only. Its errors have no common base, so every one of them is a failure
of the transport. Source of the protocol: NIXL's Python API (github.com/ai-dynamo/nixl, ``src/api/python/_api.py``).
"""

import asyncio
import importlib
import logging
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
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
from kvstore.transports.transport import TransportFailed

NAME = "nixl"
BACKEND = "UCX"

READ_TIMEOUT_S = 10.0
"""A READ that takes longer is given up, and the transport with it."""

MAX_LANDINGS = 4
"""Frames of one source that are read at a time."""

_EAGER_S = 0.002
"""A READ is asked for its state at every turn of the event loop for so long, then every millisecond."""

_OURS = "NIXL_INIT_AGENT"


class _Detail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    metadata: bytes
    """NIXL's own, of the source's agent."""
    memory: str
    address: int
    device: int
    num_blocks: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class _Landing:
    blocks: Tensor
    """``[blocks_in_frame, block_bytes]`` uint8, on the storage's device."""
    registered: Any
    slots: Any
    """NIXL's prepared list of them."""


class NixlTransport:
    """One agent for all that this worker lends and reads. Used on the event loop."""

    name = NAME

    def __init__(self, storage: KvStorage) -> None:
        """Register the blocks of ``storage``; raises TransportFailed when the package or the backend is missing."""
        self.storage = storage
        self.memory = "DRAM" if storage.device.type == "cpu" else "VRAM"
        self.mover = BlockMover.for_device(storage.device)
        with _as_failure("it cannot be started"):
            self.agent = _new_agent()
            self._registered = self.agent.register_memory([(*_place(storage.blocks), "")], self.memory)
        self._readers: weakref.WeakValueDictionary[str, NixlReader] = weakref.WeakValueDictionary()

    def offer(self) -> bytes:
        """Return the agent's metadata, and where the blocks are."""
        address, _, device = _place(self.storage.blocks)
        num_blocks, block_bytes = self.storage.blocks.shape
        with _as_failure("it has no metadata"):
            metadata = self.agent.get_agent_metadata()
        return encode(_Detail(metadata, self.memory, address, device, num_blocks, block_bytes))

    def connect(self, detail: bytes) -> "NixlReader":
        """Return a reader of another agent's blocks, the same as long as there is one."""
        try:
            found: _Detail = decode(detail, _Detail)
        except InvalidRequest as error:
            raise TransportFailed(error.message) from error
        if found.block_bytes != self.storage.layout.block_bytes:
            raise TransportFailed(f"its blocks have {found.block_bytes} bytes")
        with _as_failure("its agent cannot be connected to"):
            agent_name = _text(self.agent.add_remote_agent(found.metadata))
            reader = self._readers.get(agent_name)
            if reader is None:
                reader = self._readers[agent_name] = NixlReader(self, agent_name, found)
            return reader

    def new_landing(self) -> _Landing:
        """Return registered memory for one frame."""
        layout = self.storage.layout
        shape = (blocks_in_frame(layout.block_bytes), layout.block_bytes)
        blocks = torch.empty(shape, dtype=torch.uint8, device=self.storage.device)
        registered = self.agent.register_memory([(*_place(blocks), "")], self.memory)
        return _Landing(blocks, registered, self.prepare(_OURS, *_place(blocks)[::2], *shape))

    def drop_landing(self, landing: _Landing) -> None:
        """Give back memory that nothing is read into any more."""
        landing.slots.release()
        self.agent.deregister_memory(landing.registered)

    def prepare(self, agent_name: str, address: int, device: int, num_blocks: int, block_bytes: int) -> Any:
        """Return a prepared list with one descriptor a block."""
        descriptors = np.empty((num_blocks, 3), dtype=np.uint64)
        descriptors[:, 0] = address + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        descriptors[:, 1], descriptors[:, 2] = block_bytes, device
        return self.agent.prep_xfer_dlist(agent_name, descriptors, self.memory)


class NixlReader:
    """Reads the blocks of one source. Owned by whoever pulls from it; without an owner it disconnects."""

    name = NAME

    def __init__(self, transport: NixlTransport, agent_name: str, source: _Detail) -> None:
        self._transport = transport
        self._num_blocks = source.num_blocks
        self._source = transport.prepare(
            agent_name, source.address, source.device, source.num_blocks, source.block_bytes
        )
        self._free: list[_Landing] = []
        self._landings = asyncio.Semaphore(MAX_LANDINGS)
        self._set_aside: list[tuple[Any, _Landing]] = []
        weakref.finalize(self, transport.agent.remove_remote_agent, agent_name).atexit = False

    async def fill(self, frame: KvFrame, block_ids: Sequence[BlockId]) -> None:
        """See :class:`kvstore.transports.transport.Reader`; a byte is checked before it is written."""
        if not all(0 <= block_id < self._num_blocks for block_id in frame.block_ids):
            raise CorruptFrame(f"frame {frame.seq} names a block that does not exist")
        async with self._landings:
            landing = await self._read(frame.block_ids)
            try:
                await self._transport.mover.run(partial(self._check_and_write, frame, landing, block_ids))
            finally:
                self._free.append(landing)

    async def _read(self, source_ids: Sequence[BlockId]) -> _Landing:
        with _as_failure("a read cannot begin"):
            landing = self._take_landing()
            request = self._transport.agent.make_prepped_xfer(
                "READ", landing.slots, list(range(len(source_ids))), self._source, list(source_ids)
            )
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                with _as_failure("a read failed"):
                    await self._wait_read(request)
                    request.release()
        except TimeoutError:
            self._set_aside.append((request, landing))
            raise TransportFailed(f"a read took longer than {READ_TIMEOUT_S:g} s") from None
        except BaseException:
            self._set_aside.append((request, landing))
            raise
        return landing

    async def _wait_read(self, request: Any) -> None:
        agent = self._transport.agent
        state = agent.transfer(request)
        eager_until = time.monotonic() + _EAGER_S
        while state == "PROC":
            await asyncio.sleep(0 if time.monotonic() < eager_until else 0.001)
            state = agent.check_xfer_state(request)
        if state != "DONE":
            raise TransportFailed(f"a read ended as {state}")

    def _check_and_write(self, frame: KvFrame, landing: _Landing, block_ids: Sequence[BlockId]) -> None:
        landed = landing.blocks[: len(block_ids)]
        check_bytes(frame, (self._transport.storage.host_bytes(landed),))
        self._transport.storage.scatter(landed, block_ids)

    # ---- landings ----

    def _take_landing(self) -> _Landing:
        self._set_aside = [one for one in self._set_aside if not self._is_let_go(*one)]
        return self._free.pop() if self._free else self._transport.new_landing()

    def _is_let_go(self, request: Any, landing: _Landing) -> bool:
        """Try to end a READ that was given up; its memory is given back when NIXL says that nothing writes to it."""
        try:
            request.release()
        except Exception:  # noqa: BLE001 - NIXL raises while it cannot end the READ yet
            return False
        self._transport.drop_landing(landing)
        return True


def _new_agent() -> Any:
    api = importlib.import_module("nixl._api")
    log = logging.getLogger("nixl")  # which comes with a handler that writes to stdout
    log.handlers.clear()
    log.propagate = True
    log.setLevel(logging.WARNING)
    agent = api.nixl_agent(f"baton-{secrets.token_hex(8)}", api.nixl_agent_config(backends=[BACKEND]))
    if BACKEND not in agent.backends:
        raise TransportFailed(f"its backend {BACKEND} is missing")
    return agent


def _place(blocks: Tensor) -> tuple[int, int, int]:
    """Return the address, the length in bytes and the device of memory, as NIXL counts them."""
    return blocks.data_ptr(), blocks.numel() * blocks.element_size(), blocks.device.index or 0


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


@contextmanager
def _as_failure(what: str) -> Iterator[None]:
    """Raise TransportFailed for whatever NIXL raises inside."""
    try:
        yield
    except ImportError as error:
        raise TransportFailed("the package is not installed: pip install 'baton[nixl]'") from error
    except (TransportFailed, TimeoutError):
        raise
    except Exception as error:  # the edge to a foreign library
        raise TransportFailed(f"{what}: {error}") from error

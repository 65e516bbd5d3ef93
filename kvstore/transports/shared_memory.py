"""Reads blocks straight from the memory of another process on this machine.

The pool lies in a memory file (``memfd_create``): it has no path, nobody can make it shorter, and the kernel frees it
with the last process that maps it, however that ends. A reader reaches it as a descriptor of the source's process,
which the kernel allows to the same user only, and maps it read-only. The file's random name says that it is the one; in
another container or on another machine there is none of that name, and the transport does not connect.

A source that died leaves its readers' mappings valid. Nothing is believed of them without a frame that announced it:
the bytes are copied first, and it is the copy that is checked.
"""

import fcntl
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.errors import CorruptFrame, InvalidRequest
from common.ids import BlockId
from common.messages import KvFrame
from common.wire import decode, encode
from kvstore.incoming import check_bytes
from kvstore.storage import KvStorage
from kvstore.transports.transport import TransportFailed

NAME = "shm"

_SEALS = ("F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


class _Detail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pid: int
    descriptor: int
    name: str
    num_blocks: int
    block_bytes: int


class SharedMemory:
    """Memory for a pool of blocks that other processes of this user may map. Owned by the process that makes it.

    As with any other, pages are only taken when they are first written.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        """Raises TransportFailed where the system has no memory files."""
        self._name = f"baton-kv-{secrets.token_hex(16)}"
        size = num_blocks * block_bytes
        try:
            self._descriptor = os.memfd_create(self._name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self._descriptor)
            os.fchmod(self._descriptor, 0o600)
            os.ftruncate(self._descriptor, size)
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _seals())
            mapping = mmap.mmap(self._descriptor, size)
        except (AttributeError, OSError) as error:
            raise TransportFailed(f"this system gives no memory to share: {error}") from error
        self.blocks: NDArray[np.uint8] = np.frombuffer(mapping, dtype=np.uint8).reshape(num_blocks, block_bytes)
        """``[num_blocks, block_bytes]``, zeros at first; keeps the mapping alive."""

    def detail(self) -> bytes:
        """Return where others find it."""
        return encode(_Detail(os.getpid(), self._descriptor, self._name, *self.blocks.shape))


class SharedMemoryTransport:
    """Lends ``memory``, in which ``storage`` keeps its blocks, and connects to that of others."""

    name = NAME

    def __init__(self, storage: KvStorage, memory: SharedMemory) -> None:
        self._storage = storage
        self._memory = memory

    async def run(self) -> None:
        """Return at once: others read without this process."""

    def offer(self) -> bytes:
        """Return where the blocks are."""
        return self._memory.detail()

    def connect(self, detail: bytes) -> "SharedMemoryReader":
        """Map the blocks of another worker; raises TransportFailed when they are not within reach."""
        try:
            found: _Detail = decode(detail, _Detail)
        except InvalidRequest as error:
            raise TransportFailed(error.message) from error
        if found.block_bytes != self._storage.layout.block_bytes:
            raise TransportFailed(f"its blocks have {found.block_bytes} bytes")
        return SharedMemoryReader(self._storage, _map(found))


class SharedMemoryReader:
    """Reads the blocks of one source, ``source [num_blocks, block_bytes]``."""

    name = NAME

    def __init__(self, storage: KvStorage, source: NDArray[np.uint8]) -> None:
        self._storage = storage
        self._source = source

    async def fill(self, frame: KvFrame, block_ids: Sequence[BlockId]) -> None:
        """See :class:`kvstore.transports.transport.Reader`; wrong bytes are written, and then not believed."""
        if not all(0 <= block_id < len(self._source) for block_id in frame.block_ids):
            raise CorruptFrame(f"frame {frame.seq} names a block that does not exist")
        self._storage.gather(block_ids, self._source, frame.block_ids)
        check_bytes(frame, self._storage.parts(block_ids))


def _map(found: _Detail) -> NDArray[np.uint8]:
    """Return the blocks, read-only. What is at the given place is not opened unless its name is the right one."""
    path = f"/proc/{found.pid}/fd/{found.descriptor}"
    size = found.num_blocks * found.block_bytes
    try:
        _require_name(path, found.name)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _require_name(f"/proc/self/fd/{descriptor}", found.name)  # the process may have ended in between
            if os.fstat(descriptor).st_size != size or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != _seals():
                raise TransportFailed("its memory file is not as it was offered")
            mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise TransportFailed(f"its memory cannot be reached from here: {error.strerror}") from error
    return np.frombuffer(mapping, dtype=np.uint8).reshape(found.num_blocks, found.block_bytes)


def _require_name(path: str, name: str) -> None:
    if os.readlink(path) != f"/memfd:{name} (deleted)":
        raise TransportFailed("its memory cannot be reached from here: another machine or container")


def _seals() -> int:
    """Return the seals of a memory file whose length will never change, so that no reader runs off its end."""
    value = 0
    for seal in _SEALS:
        value |= getattr(fcntl, seal)
    return value

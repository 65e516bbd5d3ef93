"""Memory that other processes may read, and not write: taken page by page, and mapped only where it is meant."""

import os

import msgspec
import numpy as np
import pytest
import torch

from common.ids import BlockId
from common.wire import decode, encode
from kvstore.storage import KvStorage
from kvstore.transports.shared_memory import SharedMemory, SharedMemoryTransport, _Detail, _map
from kvstore.transports.transport import TransportFailed
from tests.support.transfer import LAYOUT, NUM_BLOCKS

BYTES = LAYOUT.block_bytes


def detail_of(memory: SharedMemory, **changes: object) -> bytes:
    return encode(msgspec.structs.replace(decode(memory.detail(), _Detail), **changes))


def new_transport() -> tuple[SharedMemoryTransport, SharedMemory]:
    memory = SharedMemory(NUM_BLOCKS, BYTES)
    storage = KvStorage(LAYOUT, NUM_BLOCKS, torch.device("cpu"), memory=memory.blocks)
    return SharedMemoryTransport(storage, memory), memory


def test_what_a_storage_writes_is_what_a_reader_sees():
    transport, memory = new_transport()
    storage = KvStorage(LAYOUT, NUM_BLOCKS, torch.device("cpu"), memory=memory.blocks)
    seen = _map(decode(transport.offer(), _Detail))
    payload = os.urandom(BYTES)
    storage.write([BlockId(5)], memoryview(payload))
    assert seen[5].tobytes() == payload
    assert not seen[4].any()


def test_a_reader_cannot_write():
    _, memory = new_transport()
    seen = _map(decode(memory.detail(), _Detail))
    assert not seen.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        seen[0, 0] = 1


def test_memory_is_taken_when_it_is_first_written():
    memory = SharedMemory(1024, 2**20)
    descriptor = decode(memory.detail(), _Detail).descriptor
    assert os.fstat(descriptor).st_blocks == 0
    memory.blocks[7] = 1
    assert 2**20 <= 512 * os.fstat(descriptor).st_blocks < 2**24


def test_only_its_owner_may_open_it_and_nobody_can_make_it_shorter():
    memory = SharedMemory(4, 4096)
    descriptor = decode(memory.detail(), _Detail).descriptor
    assert os.fstat(descriptor).st_mode & 0o777 == 0o600
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 4096)


def test_a_mapping_outlives_the_process_that_made_the_memory():
    memory = SharedMemory(4, BYTES)
    seen = _map(decode(memory.detail(), _Detail))
    memory.blocks[2] = 9
    del memory
    assert np.array_equal(seen[2], np.full(BYTES, 9, dtype=np.uint8))


def test_the_memory_is_closed_with_its_owner():
    memory = SharedMemory(4, BYTES)
    detail = memory.detail()
    descriptor = decode(detail, _Detail).descriptor
    del memory
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(TransportFailed, match="cannot be reached"):
        new_transport()[0].connect(detail)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pid": 2**22 + 1}, "cannot be reached from here: No such file"),
        ({"descriptor": 2**20}, "cannot be reached from here: No such file"),
        ({"descriptor": 0}, "another machine or container"),
        ({"name": "baton-kv-of-another"}, "another machine or container"),
        ({"num_blocks": NUM_BLOCKS + 1}, "not as it was offered"),
        ({"block_bytes": BYTES * 2}, f"its blocks have {BYTES * 2} bytes"),
    ],
)
def test_what_is_not_the_memory_that_was_offered_is_not_mapped(changes: dict[str, object], reason: str):
    transport, memory = new_transport()
    with pytest.raises(TransportFailed, match=reason):
        transport.connect(detail_of(memory, **changes))


def test_memory_that_could_become_shorter_is_not_mapped():
    transport, memory = new_transport()
    descriptor = os.memfd_create("baton-kv-unsealed", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, NUM_BLOCKS * BYTES)
    with pytest.raises(TransportFailed, match="not as it was offered"):
        transport.connect(detail_of(memory, descriptor=descriptor, name="baton-kv-unsealed"))
    os.close(descriptor)


@pytest.mark.parametrize("detail", [b"", b"junk", encode(_Detail(1, 2, "n", 3, 4))[:-1]])
def test_junk_is_not_connected_to(detail: bytes):
    with pytest.raises(TransportFailed):
        new_transport()[0].connect(detail)

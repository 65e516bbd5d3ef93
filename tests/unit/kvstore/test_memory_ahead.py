"""Memory of the next blocks is taken ahead: of those and no others, without a change to any content."""

import asyncio
import mmap
import os
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from common.model.spec import LayerSpec
from kernels.cpu.populate import populate
from kvstore.block_pool import BlockPool
from kvstore.host.compute_thread import ComputeThread
from kvstore.host.memory_ahead import AHEAD_BYTES, MemoryAhead
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives memory ahead")]

LAYOUT = KvLayout((LayerSpec(8, 512, 512),), 128, torch.float32)  # 4 MiB a block
NUM_AHEAD = AHEAD_BYTES // LAYOUT.block_bytes
NUM_BLOCKS = 3 * NUM_AHEAD


class Pool:
    """A pool in a memory file, which says how much memory it has been given."""

    def __init__(self) -> None:
        self._file = os.memfd_create("pool")
        os.ftruncate(self._file, NUM_BLOCKS * LAYOUT.block_bytes)
        memory = np.frombuffer(mmap.mmap(self._file, 0), dtype=np.uint8).reshape(NUM_BLOCKS, -1)
        self.storage = KvStorage(LAYOUT, NUM_BLOCKS, torch.device("cpu"), memory=memory)
        self.pool = BlockPool(NUM_BLOCKS, LAYOUT.block_size)
        self.compute = ComputeThread()
        self.ahead = MemoryAhead(self.pool, self.storage, self.compute)

    @property
    def num_blocks_given(self) -> float:
        return os.fstat(self._file).st_blocks * 512 / LAYOUT.block_bytes

    def close(self) -> None:
        self.compute.close()
        os.close(self._file)


@pytest.fixture
def made() -> Iterator[Pool]:
    pool = Pool()
    if not populate(pool.storage.blocks.data_ptr(), mmap.PAGESIZE):
        pytest.skip("this kernel does not give memory ahead")
    yield pool
    pool.close()


async def test_the_next_blocks_get_their_memory_and_no_others(made: Pool) -> None:
    await made.ahead.take(asyncio.Event())
    assert made.num_blocks_given == NUM_AHEAD
    first = made.pool.allocate(3)
    await made.ahead.take(asyncio.Event())
    assert made.num_blocks_given == NUM_AHEAD + 3
    made.pool.release(first)
    await made.ahead.take(asyncio.Event())
    assert made.num_blocks_given == NUM_AHEAD + 3


async def test_work_that_waits_is_let_through(made: Pool) -> None:
    work = asyncio.Event()
    work.set()
    before = made.num_blocks_given
    await made.ahead.take(work)
    assert made.num_blocks_given == before
    work.clear()
    async with asyncio.TaskGroup() as group:
        taking = group.create_task(made.ahead.take(work))
        await made.compute.call(lambda: None)
        work.set()
        await taking
    assert made.num_blocks_given < NUM_AHEAD


async def test_content_stays(made: Pool) -> None:
    (block_id,) = made.pool.next_free(1)
    payload = os.urandom(LAYOUT.block_bytes)
    made.storage.write([block_id], memoryview(payload))
    await made.ahead.take(asyncio.Event())
    assert made.storage.read([block_id]) == payload
    assert not any(made.storage.read(made.pool.next_free(2)[1:]))

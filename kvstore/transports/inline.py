"""The transport that always is: gRPC carries the bytes in the frames themselves."""

from collections.abc import Sequence
from functools import partial

from common.errors import CorruptFrame
from common.ids import BlockId
from common.messages import GRPC, KvFrame
from kvstore.block_mover import BlockMover
from kvstore.incoming import check_bytes
from kvstore.storage import KvStorage


class InlineReader:
    """Reads from any source. Owned by one transfer client; its copies run where ``mover`` runs them."""

    name = GRPC

    def __init__(self, storage: KvStorage, mover: BlockMover) -> None:
        self._storage = storage
        self._mover = mover

    async def fill(self, frame: KvFrame, block_ids: Sequence[BlockId]) -> None:
        """See :class:`kvstore.transports.transport.Reader`; a byte is checked before it is written."""
        if frame.payload is None:
            raise CorruptFrame(f"frame {frame.seq} came without its bytes")
        await self._mover.run(partial(self._check_and_write, frame, frame.payload, block_ids))

    def _check_and_write(self, frame: KvFrame, payload: bytes | memoryview, block_ids: Sequence[BlockId]) -> None:
        check_bytes(frame, (payload,))
        self._storage.write(block_ids, memoryview(payload))

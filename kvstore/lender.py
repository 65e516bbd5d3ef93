"""Lends cached prefixes to other workers: pins the blocks, and opens a transfer that they are pulled through.

A loan ends as every transfer does, by Done, Cancel or the end of its lease; then the blocks are cache again. Serves
also what a gateway may ask of a cache: to keep some prefixes, and to forget everything.
"""

import asyncio
from collections.abc import Iterable, Sequence

from common.errors import StaleEpoch
from common.ids import BlockId, Epoch, TransferId
from common.messages import Ack, Borrow, BorrowReply, Keep, ResetCache
from common.rpc import Handlers
from common.services import BORROW, KEEP, RESET_CACHE
from kvstore.block_pool import BlockPool
from kvstore.prefix_hash import split_chain
from kvstore.transfer_server import TransferServer


class Lender:
    """All loans of one worker. Owned by its host; on the event loop."""

    def __init__(self, pool: BlockPool, transfers: TransferServer, epoch: Epoch) -> None:
        self.num_loans = 0
        """Loans since the start."""
        self._pool = pool
        self._transfers = transfers
        self._epoch = epoch
        self._loans: dict[TransferId, list[BlockId]] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    def handlers(self) -> Handlers:
        """Return what every owner of a cache serves."""
        return Handlers(unary={BORROW: self._borrow, KEEP: self._keep, RESET_CACHE: self._reset}, stream={}, bidi={})

    def released(self, transfer_id: TransferId) -> bool:
        """A transfer has ended; return whether it was a loan."""
        block_ids = self._loans.pop(transfer_id, None)
        if block_ids is None:
            return False
        self._pool.release(block_ids)
        if not self._loans:
            self._empty.set()
        return True

    def holders(self) -> Iterable[Sequence[BlockId]]:
        """Return the blocks of each loan, which hold one reference each."""
        return self._loans.values()

    async def wait_returned(self) -> None:
        """Wait until no loan is left; for a shutdown."""
        await self._empty.wait()

    async def _borrow(self, borrow: Borrow) -> BorrowReply:
        self._check_epoch(borrow.epoch)
        if borrow.transfer_id in self._loans:
            return BorrowReply(0, 0)
        block_ids = self._pool.pin_prefix(split_chain(borrow.chain))
        if not block_ids:
            return BorrowReply(0, 0)
        self.num_loans += 1
        self._loans[borrow.transfer_id] = block_ids
        self._empty.clear()
        outgoing = self._transfers.open(borrow.transfer_id, block_ids)
        outgoing.lend()
        return BorrowReply(len(block_ids), outgoing.generation)

    async def _keep(self, keep: Keep) -> Ack:
        self._check_epoch(keep.epoch)
        self._pool.keep(block_hash for chain in keep.chains for block_hash in split_chain(chain))
        return Ack()

    async def _reset(self, reset: ResetCache) -> Ack:
        self._check_epoch(reset.epoch)
        self._pool.reset_cache()
        return Ack()

    def _check_epoch(self, epoch: Epoch) -> None:
        if epoch != self._epoch:
            raise StaleEpoch("the worker has restarted since")

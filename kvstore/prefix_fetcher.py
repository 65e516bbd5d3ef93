"""Gets a prefix that another worker holds into this worker's cache, when that is cheaper than computing it.

Both sides of the comparison are measured: the rate at which this worker computes prompt tokens, and the time and rate
of its pulls. What was fetched is published and then ordinary cache: whoever schedules the prompt finds it there. A
fetch that fails, or takes longer than computing would, costs that time and nothing else; the valid prefix stays.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from common.errors import BatonError
from common.ids import BlockHash, BlockId, Epoch, new_transfer_id
from common.messages import Borrow, BorrowReply, Offer, PeerPrefix
from common.services import BORROW
from kvstore.block_pool import OutOfBlocks
from kvstore.block_table import BlockTable
from kvstore.peers import PeerSet
from kvstore.prefix_hash import join_chain
from kvstore.pull_meter import PullMeter
from kvstore.transfer_client import TransferClient

log = logging.getLogger(__name__)

BORROW_TIMEOUT_S = 2.0
"""A holder that does not answer for this long lends nothing."""

PATIENCE_S = 1.0
"""A pull may take this much longer than computing would; then what is missing is computed."""


class PrefixFetcher:
    """All fetches of one worker. Owned by its host; on the event loop."""

    def __init__(
        self, puller: TransferClient, peers: PeerSet, block_size: int, epoch: Epoch, *, meter: PullMeter
    ) -> None:
        self.meter = meter
        self.num_fetches = 0
        self.num_failed = 0
        self.num_fetched_tokens = 0
        self._puller = puller
        self._peers = peers
        self._block_size = block_size
        self._epoch = epoch
        self._running: dict[BlockHash, asyncio.Event] = {}
        self._tables: set[BlockTable] = set()

    def holders(self) -> Iterable[Sequence[BlockId]]:
        """Return the blocks of each fetch that runs."""
        return [table.block_ids for table in self._tables]

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return {
            "prefix_fetches": self.num_fetches,
            "prefix_fetches_failed": self.num_failed,
            "prefix_fetched_tokens": self.num_fetched_tokens,
        }

    async def fetch(
        self, token_ids: Sequence[int], peer: PeerPrefix, new_table: Callable[[], BlockTable], tokens_per_s: float
    ) -> int:
        """Return how many tokens of ``token_ids`` were brought into the cache from ``peer``.

        Never raises for a fault of the peer. ``tokens_per_s`` is the measured rate of computing them here, 0 when it
        is not known. When the same blocks are being fetched already, wait for that and return 0.
        """
        table = new_table()
        have = table.cached_prefix(token_ids)
        wanted = min(peer.num_tokens, len(token_ids) - 1) // self._block_size * self._block_size
        if wanted <= have or not self.meter.is_cheaper(wanted - have, tokens_per_s):
            return 0
        chain = table.block_hashes(token_ids)[: wanted // self._block_size]
        missing = chain[have // self._block_size]
        running = self._running.get(missing)
        if running is not None:
            await running.wait()
            return 0
        done = self._running[missing] = asyncio.Event()
        self._tables.add(table)
        self.num_fetches += 1
        try:
            limit_s = PATIENCE_S + (wanted - have) / tokens_per_s if tokens_per_s else PATIENCE_S * 10
            fetched = await self._fetch(token_ids, peer, table, chain, limit_s)
        except BatonError as error:
            self.num_failed += 1
            log.info("a prefix was not fetched from %s, it is computed here: %s", peer.worker_id, error.message)
            fetched = 0
        finally:
            self._tables.discard(table)
            table.release()
            del self._running[missing]
            done.set()
        self.num_fetched_tokens += fetched
        return fetched

    async def _fetch(
        self, token_ids: Sequence[int], peer: PeerPrefix, table: BlockTable, chain: Sequence[BlockHash], limit_s: float
    ) -> int:
        offer, num_tokens = await self._borrow(peer, chain)
        have = table.adopt_prefix(token_ids)
        if num_tokens <= have:
            if num_tokens:
                self._puller.done(offer)
            return 0
        try:
            table.grow(num_tokens)
        except OutOfBlocks:
            self._puller.cancel(offer, "no room for the prefix")
            raise
        return await self._pull(token_ids, offer, table, have, limit_s)

    async def _borrow(self, peer: PeerPrefix, chain: Sequence[BlockHash]) -> tuple[Offer, int]:
        transfer_id = new_transfer_id()
        offer = Offer(transfer_id, peer.worker_id, peer.epoch, peer.address, 0, 0, decode_epoch=self._epoch)
        began = asyncio.get_running_loop().time()
        try:
            with self._peers.use(peer.address) as client:
                request = Borrow(peer.epoch, transfer_id, join_chain(chain))
                reply: BorrowReply = await client.call(BORROW, request, BORROW_TIMEOUT_S)
        except BatonError:
            self._puller.cancel(offer, "the answer to Borrow did not come")  # the loan may have been made
            raise
        self.meter.borrowed(asyncio.get_running_loop().time() - began)
        offer = msgspec.structs.replace(offer, generation=reply.generation)
        return offer, min(reply.num_blocks, len(chain)) * self._block_size

    async def _pull(self, token_ids: Sequence[int], offer: Offer, table: BlockTable, have: int, limit_s: float) -> int:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(limit_s, self._puller.stop, offer)
        began = loop.time()
        try:
            outcome = await self._puller.pull(offer, have, table.block_ids, lambda handover: None, is_loan=True)
        except asyncio.CancelledError:
            self._puller.cancel(offer, "the fetch was cancelled")
            raise
        finally:
            timer.cancel()
        fetched = outcome.num_tokens - have
        self.meter.pulled(fetched, loop.time() - began)
        table.publish(token_ids, outcome.num_tokens)
        if outcome.error is None:
            self._puller.done(offer)
        else:
            self.num_failed += 1
            self._puller.cancel(offer, outcome.error.message)
            log.info("a prefix was fetched in part: %s", outcome.error.message)
        return fetched

"""Every source that this worker has greeted: that its blocks mean the same as ours, and how their bytes get here.

A pair is greeted once in a life of the source. How it reads is decided then, and once more when that fails: from then
on its bytes come by gRPC.
"""

import logging

from common.errors import StaleEpoch
from common.ids import Epoch
from common.messages import Hello, HelloReply, Offer
from common.rpc import RpcClient
from common.services import HELLO
from kvstore.fingerprint import require_same
from kvstore.transports.transport import Reader
from kvstore.transports.transports import Transports

log = logging.getLogger(__name__)


class Pair:
    """One life of one source."""

    __slots__ = ("epoch", "reader", "worker_id")

    def __init__(self, source: HelloReply, reader: Reader) -> None:
        self.worker_id = source.worker_id
        self.epoch: Epoch = source.epoch
        self.reader = reader
        """What new pulls read with."""


class Pairs:
    """All pairs of one puller. Owned by its transfer client."""

    def __init__(self, identity: HelloReply, transports: Transports, inline: Reader) -> None:
        self._identity = identity
        self._transports = transports
        self._inline = inline
        self._pairs: dict[str, Pair] = {}

    async def greet(self, client: RpcClient, offer: Offer, timeout_s: float) -> Pair:
        """Return the pair with the source of ``offer``; raises FingerprintMismatch, StaleEpoch or as a call does."""
        known = self._known(offer)
        if known is not None:
            return known
        ours = self._identity
        reply: HelloReply = await client.call(HELLO, Hello(ours.worker_id, ours.epoch, ours.fingerprint), timeout_s)
        if reply.epoch != offer.epoch:
            raise StaleEpoch("the worker that made the offer has restarted since")
        require_same(ours, reply)
        return self._known(offer) or self._begin(offer.address, reply)

    def fall_back(self, pair: Pair, reason: str) -> None:
        """Let the pair's bytes come by gRPC from now on."""
        if pair.reader is not self._inline:
            names = pair.worker_id, self._inline.name, pair.reader.name
            log.warning("blocks of %s come by %s and no longer by %s: %s", *names, reason)
            pair.reader = self._inline

    def _known(self, offer: Offer) -> Pair | None:
        pair = self._pairs.get(offer.address)
        return pair if pair is not None and pair.epoch == offer.epoch else None

    def _begin(self, address: str, source: HelloReply) -> Pair:
        choice = self._transports.choose(source.transports, self._inline)
        pair = self._pairs[address] = Pair(source, choice.reader)
        log.info("blocks of %s come by %s%s", pair.worker_id, pair.reader.name, choice.reason and f" ({choice.reason})")
        return pair

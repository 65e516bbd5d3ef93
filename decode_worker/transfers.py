"""The transfers that requests wait for: named by a remote plan, offered by a prefill worker, then given up or complete.

Plan and offer come from two processes, in either order. This is the one place that changes a request's ``transfer_id``
and ``offer``; the bytes are the concern of :mod:`decode_worker.pulls`.
"""

import asyncio
from collections import deque

from common.ids import TransferId
from common.messages import Offer
from decode_worker.request import Request
from kvstore.transfer_client import TransferClient

PLAN_WAIT_S = 2.0
"""An offer waits this long for its plan: they come from two processes, and the offer may be the faster one."""

_NUM_REMEMBERED = 1024
"""So many transfers that are over are remembered, so that a late offer of one is refused at once."""


class Transfers:
    """Owns which request expects which transfer."""

    def __init__(self, puller: TransferClient) -> None:
        self._puller = puller
        self._requests: dict[TransferId, Request] = {}
        self._past: deque[TransferId] = deque(maxlen=_NUM_REMEMBERED)
        self._changed = asyncio.Event()

    def expect(self, request: Request, transfer_id: TransferId) -> None:
        """A plan has named the transfer; another one that the request expected is forgotten."""
        self.forget(request)
        request.transfer_id = transfer_id
        self._requests[transfer_id] = request
        self._notify()

    async def find(self, transfer_id: TransferId) -> Request | None:
        """Return the request that expects the transfer, once its plan is here; None when none is or comes."""
        try:
            async with asyncio.timeout(PLAN_WAIT_S):
                while transfer_id not in self._requests and transfer_id not in self._past:
                    await self._changed.wait()
        except TimeoutError:
            pass
        return self._requests.get(transfer_id)

    def offered(self, request: Request, offer: Offer) -> None:
        """The request takes the offer; its lease is kept alive from now on."""
        request.offer = offer
        self._puller.expect(offer)

    def withdraw(self, request: Request, reason: str) -> None:
        """The request needs its transfer no more, and no pull of it runs: tell the source."""
        if request.offer is not None:
            self._puller.cancel(request.offer, reason)
        self.forget(request)

    def stop(self, request: Request) -> None:
        """End the pull that runs for the request, soon."""
        if request.offer is not None:
            self._puller.stop(request.offer)

    def forget(self, request: Request) -> None:
        """The request expects no transfer any more; the source is not told."""
        if request.transfer_id is not None and self._requests.pop(request.transfer_id, None) is not None:
            self._past.append(request.transfer_id)
            self._notify()
        request.transfer_id = None
        request.offer = None

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

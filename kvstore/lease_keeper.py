"""Keeps the leases of awaited transfers alive, and tells their sources when they may go.

One Renew a source and interval carries all its ids. Done and Cancel go out at once; what comes up while one is on its
way travels in the next, together. A source that does not answer is tried a few times; then its lease ends the
transfer. One source never holds up another.
"""

import asyncio
import dataclasses
import logging
from collections import defaultdict

from common.errors import BatonError, StaleEpoch
from common.ids import Epoch, TransferId
from common.messages import Cancel, Done, Lease, Offer, Renew, RenewReply
from common.services import CANCEL, DONE, RENEW
from kvstore.peers import PeerSet

log = logging.getLogger(__name__)

RENEW_S = 5.0
"""Seconds between renewals; a sixth of the default lease."""

CALL_TIMEOUT_S = 3.0
TRIES = 4
BACKOFF_S = 0.25
"""Wait before the second try; doubles with each further one."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """One life of one worker that lends blocks."""

    address: str
    epoch: Epoch


@dataclasses.dataclass(slots=True)
class _Farewells:
    """What a source has yet to be told."""

    done: list[Lease] = dataclasses.field(default_factory=list)
    cancelled: defaultdict[str, list[TransferId]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    """By reason."""


@dataclasses.dataclass(slots=True)
class KeeperCounters:
    """What a lease keeper has done since its start."""

    renewals: int = 0
    """Renew messages that were answered."""
    renewals_failed: int = 0
    leases_lost: int = 0
    """Awaited transfers that their source no longer knew."""
    farewells_lost: int = 0
    """Done and Cancel messages that no try delivered."""


class LeaseKeeper:
    """Owned by one transfer client; works while :meth:`run` does, on the event loop."""

    def __init__(self, peers: PeerSet, renew_s: float) -> None:
        self.counters = KeeperCounters()
        self._peers = peers
        self._renew_s = renew_s
        self._awaited: dict[TransferId, Offer] = {}
        self._farewells: dict[_Source, _Farewells] = {}
        self._telling: set[_Source] = set()
        self._renewing: set[_Source] = set()
        self._wake = asyncio.Event()
        self._all_told = asyncio.Event()
        self._all_told.set()

    @property
    def num_awaited(self) -> int:
        """Transfers whose leases are being renewed."""
        return len(self._awaited)

    def expect(self, offer: Offer) -> None:
        """Renew this transfer's lease from now on, until :meth:`done` or :meth:`cancel`."""
        self._awaited[offer.transfer_id] = offer

    def done(self, offer: Offer) -> None:
        """Let the source release the transfer, which was received."""
        self._awaited.pop(offer.transfer_id, None)
        self._farewells_to(offer).done.append(Lease(offer.transfer_id, offer.generation))

    def cancel(self, offer: Offer, reason: str) -> None:
        """Let the source drop the transfer, whatever state it is in."""
        self._awaited.pop(offer.transfer_id, None)
        self._farewells_to(offer).cancelled[reason].append(offer.transfer_id)

    async def wait_told(self) -> None:
        """Wait until every Done and Cancel so far was delivered or given up."""
        await self._all_told.wait()

    async def run(self) -> None:
        """Work until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._renew_on_time(group))
            while True:
                for source in self._farewells.keys() - self._telling:
                    self._telling.add(source)
                    group.create_task(self._tell(source))
                self._wake.clear()
                await self._wake.wait()

    # ---- renewals ----

    async def _renew_on_time(self, group: asyncio.TaskGroup) -> None:
        while True:
            await asyncio.sleep(self._renew_s)
            by_source: defaultdict[_Source, list[TransferId]] = defaultdict(list)
            for offer in self._awaited.values():
                by_source[_Source(offer.address, offer.epoch)].append(offer.transfer_id)
            for source in by_source.keys() - self._renewing:  # one at a time, however slow the answer
                self._renewing.add(source)
                group.create_task(self._renew(source, tuple(by_source[source])))
            await self._peers.close_idle()

    async def _renew(self, source: _Source, transfer_ids: tuple[TransferId, ...]) -> None:
        message = Renew(source.epoch, transfer_ids)
        try:
            with self._peers.use(source.address) as client:
                reply: RenewReply = await client.call(RENEW, message, CALL_TIMEOUT_S)
        except StaleEpoch:
            self._lose(transfer_ids)
        except BatonError as error:
            self.counters.renewals_failed += 1
            log.info("leases of %d transfers were not renewed at %s: %s", len(transfer_ids), source.address, error)
        else:
            self.counters.renewals += 1
            self._lose(reply.unknown)
        finally:
            self._renewing.remove(source)

    def _lose(self, transfer_ids: tuple[TransferId, ...]) -> None:
        for transfer_id in transfer_ids:
            if self._awaited.pop(transfer_id, None) is not None:
                self.counters.leases_lost += 1

    # ---- farewells ----

    def _farewells_to(self, offer: Offer) -> _Farewells:
        self._all_told.clear()
        self._wake.set()
        return self._farewells.setdefault(_Source(offer.address, offer.epoch), _Farewells())

    async def _tell(self, source: _Source) -> None:
        while (farewells := self._farewells.pop(source, None)) is not None:
            if farewells.done:
                await self._deliver(source, Done(source.epoch, tuple(farewells.done)))
            for reason, transfer_ids in farewells.cancelled.items():
                await self._deliver(source, Cancel(source.epoch, tuple(transfer_ids), reason))
        self._telling.remove(source)
        if not self._telling and not self._farewells:
            self._all_told.set()

    async def _deliver(self, source: _Source, message: Done | Cancel) -> None:
        method = DONE if isinstance(message, Done) else CANCEL
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
            try:
                with self._peers.use(source.address) as client:
                    await client.call(method, message, CALL_TIMEOUT_S)
            except StaleEpoch:
                return  # that life of the source is over, and its leases with it
            except BatonError as error:
                log.info("%s was not delivered to %s: %s", type(message).__name__, source.address, error)
            else:
                return
        self.counters.farewells_lost += 1

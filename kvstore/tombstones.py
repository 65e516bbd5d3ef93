"""Transfers that have ended, remembered for a while so that late messages about them get the right answer.

A cancel may overtake the transfer that it is about: it is remembered too, and that transfer ends as it opens. Time is
an argument.
"""

from collections import OrderedDict
from dataclasses import dataclass

from common.errors import BatonError
from common.ids import TransferId
from kvstore.outgoing import ReleaseReason


@dataclass(frozen=True, slots=True)
class Tombstone:
    """How a transfer ended, and what its puller is told."""

    reason: ReleaseReason
    error: BatonError
    forgotten_at_s: float


class Tombstones:
    """At most ``limit`` tombstones of ``keep_s`` seconds each, the oldest forgotten first. Owned by one server."""

    def __init__(self, keep_s: float, limit: int) -> None:
        self._keep_s = keep_s
        self._limit = limit
        self._stones: OrderedDict[TransferId, Tombstone] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stones)

    def bury(self, transfer_id: TransferId, reason: ReleaseReason, error: BatonError, now: float) -> None:
        """Remember how a transfer ended; a later end replaces an earlier one."""
        self._stones.pop(transfer_id, None)
        self._stones[transfer_id] = Tombstone(reason, error, now + self._keep_s)
        while len(self._stones) > self._limit or next(iter(self._stones.values())).forgotten_at_s <= now:
            self._stones.popitem(last=False)

    def find(self, transfer_id: TransferId, now: float) -> Tombstone | None:
        """Return how a transfer ended, if that is still known."""
        stone = self._stones.get(transfer_id)
        return stone if stone is not None and stone.forgotten_at_s > now else None

    def forget(self, transfer_id: TransferId) -> None:
        """The transfer begins anew."""
        self._stones.pop(transfer_id, None)

"""Which transfers keep blocks pinned at their source, and until when.

    granted ──renewed──▶ granted ──▶ released (done, cancelled, or expired and reaped)

A lease lasts ``lease_s`` seconds from its grant or last renewal. Release is idempotent and carries a generation, so a
late or repeated one never ends a newer lease. Time is an argument. A lease names blocks; the references belong to
whoever granted it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from common.ids import BlockId, TransferId


@dataclass(frozen=True, slots=True)
class _Entry:
    block_ids: tuple[BlockId, ...]
    generation: int
    expires_at_s: float


class LeaseTable:
    """All leases of one worker. Owned by its transfer server, used on the event loop only."""

    def __init__(self, lease_s: float) -> None:
        if lease_s <= 0:
            raise ValueError(f"a lease must last longer than {lease_s} seconds")
        self.lease_s = lease_s
        self._entries: OrderedDict[TransferId, _Entry] = OrderedDict()  # next to expire first
        self._last_generation = 0
        self._latest_s = float("-inf")

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, transfer_id: TransferId) -> bool:
        return transfer_id in self._entries

    def grant(self, transfer_id: TransferId, block_ids: Sequence[BlockId], now: float) -> int:
        """Begin a lease and return its generation; raises ValueError when the transfer has one."""
        if transfer_id in self._entries:
            raise ValueError(f"transfer {transfer_id} already has a lease")
        self._last_generation += 1
        self._entries[transfer_id] = _Entry(tuple(block_ids), self._last_generation, self._expiry(now))
        return self._last_generation

    def renew(self, transfer_ids: Iterable[TransferId], now: float) -> tuple[TransferId, ...]:
        """Let each lease last ``lease_s`` seconds from ``now``; return the ids that have none."""
        expires_at_s = self._expiry(now)
        unknown: list[TransferId] = []
        for transfer_id in transfer_ids:
            entry = self._entries.pop(transfer_id, None)
            if entry is None:
                unknown.append(transfer_id)
            else:
                self._entries[transfer_id] = _Entry(entry.block_ids, entry.generation, expires_at_s)
        return tuple(unknown)

    def release(self, transfer_id: TransferId, generation: int | None) -> bool:
        """End a lease; ``None`` stands for any generation. Returns False when there is nothing to end."""
        entry = self._entries.get(transfer_id)
        if entry is None or generation not in (None, entry.generation):
            return False
        del self._entries[transfer_id]
        return True

    def expired(self, now: float) -> list[TransferId]:
        """Return the leases that have run out, oldest first; they stay until they are released."""
        found: list[TransferId] = []
        for transfer_id, entry in self._entries.items():
            if entry.expires_at_s > now:
                break
            found.append(transfer_id)
        return found

    def remaining(self, now: float) -> list[tuple[TransferId, int, float]]:
        """Return each lease's transfer, number of blocks, and seconds that are left of it."""
        return [
            (transfer_id, len(entry.block_ids), max(0.0, entry.expires_at_s - now))
            for transfer_id, entry in self._entries.items()
        ]

    def holders(self) -> list[Sequence[BlockId]]:
        """Return the blocks that each lease names."""
        return [entry.block_ids for entry in self._entries.values()]

    def _expiry(self, now: float) -> float:
        self._latest_s = max(self._latest_s, now)  # keeps the entries in order of expiry
        return self._latest_s + self.lease_s

"""What entered and left a pool's prefix cache, in order, for an index elsewhere to follow.

Bounded: when nobody drains it the oldest events are lost, and the next drain says so; a follower then starts again
from :meth:`kvstore.block_pool.BlockPool.cached_entries`. Knows nothing of who follows.
"""

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from common.ids import BlockHash, BlockId


class CacheChange(enum.Enum):
    """What happened to a hash."""

    STORED = "stored"  # lookups find it from now on
    REMOVED = "removed"  # evicted, withdrawn or reset


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One hash that entered or left the cache."""

    change: CacheChange
    block_hash: BlockHash
    block_id: BlockId
    parent: BlockHash | None
    """Hash of the block before it in its chain; None for the first block of a sequence."""


@dataclass(frozen=True, slots=True)
class CacheEvents:
    """Events since the last drain, oldest first; ``complete`` is False when older ones were lost."""

    events: tuple[CacheEvent, ...]
    complete: bool


class CacheLog:
    """A bounded queue of events. Owned by one BlockPool, drained by at most one follower."""

    def __init__(self, limit: int) -> None:
        self.on_first: Callable[[], None] | None = None
        """Called when something is recorded and nothing was waiting to be drained."""
        self._events: deque[CacheEvent] = deque(maxlen=limit)
        self._complete = True

    def record(self, event: CacheEvent) -> None:
        """Append one event; the oldest is lost when the log is full."""
        if len(self._events) == self._events.maxlen:
            self._complete = False
        self._events.append(event)
        if len(self._events) == 1 and self.on_first is not None:
            self.on_first()

    def drain(self) -> CacheEvents:
        """Return what was recorded since the last call, and forget it."""
        drained = CacheEvents(tuple(self._events), self._complete)
        self._events.clear()
        self._complete = True
        return drained

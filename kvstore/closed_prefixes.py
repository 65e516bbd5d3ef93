"""Which cached blocks may be told to others: those whose whole chain is cached too.

A pool can lose a block in the middle of a chain and keep what follows. That rest cannot be used, so it is not told;
when the missing block comes back, the rest is told again. What is told is thus always prefix-closed.

Pure, and linear in what changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.ids import BlockHash, BlockId
from kvstore.block_pool import CacheEntry
from kvstore.cache_log import CacheChange, CacheEvent


@dataclass(frozen=True, slots=True)
class Told:
    """What changed for others since the last :meth:`ClosedPrefixes.take`."""

    stored: Mapping[BlockHash, BlockId]
    removed: tuple[BlockHash, ...]


class ClosedPrefixes:
    """Follows the events of one pool. Owned by the publisher of its index."""

    def __init__(self) -> None:
        self._cached: dict[BlockHash, tuple[BlockId, BlockHash | None]] = {}
        self._children: dict[BlockHash, dict[BlockHash, None]] = {}
        self._told: set[BlockHash] = set()
        self._changed: dict[BlockHash, None] = {}
        self._known: set[BlockHash] = set()  # what others knew at the last take

    def __len__(self) -> int:
        return len(self._told)

    def restart(self, entries: Mapping[BlockHash, CacheEntry]) -> None:
        """Follow a pool from what it holds now on, after events were lost."""
        for block_hash in list(self._cached):
            self._remove(block_hash)
        for block_hash, entry in entries.items():
            self._add(block_hash, entry.block_id, entry.parent)

    def apply(self, events: Iterable[CacheEvent]) -> None:
        """Follow ``events``, oldest first."""
        for event in events:
            if event.change is CacheChange.STORED:
                self._add(event.block_hash, event.block_id, event.parent)
            else:
                self._remove(event.block_hash)

    def take(self) -> Told:
        """Return what is to be told since the last call; a hash that only came and went is in neither part."""
        stored = {block_hash: self._cached[block_hash][0] for block_hash in self._changed if block_hash in self._told}
        removed = tuple(
            block_hash for block_hash in self._changed if block_hash not in self._told and block_hash in self._known
        )
        self._known.update(stored)
        self._known.difference_update(removed)
        self._changed.clear()
        return Told(stored, removed)

    def depth(self, chain: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of ``chain`` others can find here."""
        return next((at for at, block_hash in enumerate(chain) if block_hash not in self._told), len(chain))

    def told(self) -> dict[BlockHash, BlockId]:
        """Return everything that others should know now."""
        return {block_hash: self._cached[block_hash][0] for block_hash in self._told}

    def _add(self, block_hash: BlockHash, block_id: BlockId, parent: BlockHash | None) -> None:
        self._cached[block_hash] = (block_id, parent)
        if parent is not None:
            self._children.setdefault(parent, {})[block_hash] = None
        if parent is None or parent in self._told:
            self._tell(block_hash)

    def _remove(self, block_hash: BlockHash) -> None:
        if block_hash in self._told:
            self._withdraw(block_hash)
        _, parent = self._cached.pop(block_hash)
        if parent is not None:
            siblings = self._children[parent]
            del siblings[block_hash]
            if not siblings:
                del self._children[parent]

    def _tell(self, block_hash: BlockHash) -> None:
        waiting = [block_hash]
        while waiting:
            found = waiting.pop()
            self._told.add(found)
            self._changed[found] = None
            waiting += self._children.get(found, ())

    def _withdraw(self, block_hash: BlockHash) -> None:
        leaving = [block_hash]
        while leaving:
            found = leaving.pop()
            self._told.discard(found)
            self._changed[found] = None
            leaving += [child for child in self._children.get(found, ()) if child in self._told]

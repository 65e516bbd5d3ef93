"""The KV blocks of one worker: who holds which, which are cached, which are free.

A block is in one of four states, and every operation moves blocks between them in O(1) a block:

    free ──allocate──▶ held ──release──▶ cached (it carries a hash) or free (it does not)
                        │ ▲────pin_prefix──── cached ──allocate, when nothing is free──▶ held, hash forgotten
                        └──quarantine──▶ quarantined ──end_quarantine──▶ free

A held block has one reference for each table or lease that names it. Which cached block goes first is for a
:class:`kvstore.retention.Retention` to say; a sequence's tail is retired before its head, because a chain without its
head cannot be found. Holds no KV bytes and knows no tokens: content is whatever the publisher of a hash says.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from common.errors import Overloaded
from common.ids import BlockHash, BlockId
from common.messages import BlockCounts
from kvstore.cache_log import CacheChange, CacheEvent, CacheEvents, CacheLog
from kvstore.retention import LeastRecentlyUsed, Retention, Tenant

_CACHE_LOG_LIMIT = 65_536
_MAX_REPORTED = 10


class OutOfBlocks(Overloaded):
    """More blocks were asked for than are free or can be evicted."""


class IntegrityError(AssertionError):
    """The pool was misused, or its books do not balance; the message says which blocks and how."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A block that can be found by its hash."""

    block_id: BlockId
    parent: BlockHash | None
    """Hash of the block before it; None for the first of a chain."""
    tenant: Tenant | None
    """Whose cap its block counts against."""


class BlockPool:
    """The books of ``num_blocks`` blocks of ``block_size`` tokens. Owned by one worker, used on its event loop only.

    ``retention`` chooses what is evicted; without one, the least recently used block.
    """

    def __init__(self, num_blocks: int, block_size: int, retention: Retention | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and slots, got {num_blocks} blocks of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        """Cached blocks that were given up to make room, since the start."""
        self._ref_counts = [0] * num_blocks
        self._hash_of: list[BlockHash | None] = [None] * num_blocks
        self._entries: dict[BlockHash, CacheEntry] = {}
        self._free = [BlockId(index) for index in reversed(range(num_blocks))]
        self._evictable: Retention = LeastRecentlyUsed() if retention is None else retention
        self._kept: set[BlockHash] = set()
        self._kept_idle: set[BlockId] = set()  # cached, never a victim
        self._quarantined: set[BlockId] = set()
        self._log = CacheLog(_CACHE_LOG_LIMIT)

    @property
    def num_available(self) -> int:
        """Blocks that :meth:`allocate` can hand out now: free ones and cached ones that are not kept."""
        return len(self._free) + len(self._evictable)

    def counts(self) -> BlockCounts:
        """Return how many blocks are in each state."""
        free, quarantined = len(self._free), len(self._quarantined)
        cached = len(self._evictable) + len(self._kept_idle)
        held = self.num_blocks - free - cached - quarantined
        return BlockCounts(self.num_blocks, free, cached, held, quarantined)

    def quarantined(self) -> list[BlockId]:
        """Return the blocks that are set aside, in order."""
        return sorted(self._quarantined)

    def ref_count(self, block_id: BlockId) -> int:
        """Return how many references name the block; 0 unless it is held."""
        return self._ref_counts[block_id]

    def block_hash(self, block_id: BlockId) -> BlockHash | None:
        """Return the hash under which the block can be found, if it has one."""
        return self._hash_of[block_id]

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Take blocks with one reference each; their content is undefined.

        Free blocks go first, then cached ones are evicted. Raises OutOfBlocks, and takes nothing, when there are
        fewer than ``num_blocks``.
        """
        if num_blocks < 0:
            raise ValueError(f"cannot allocate {num_blocks} blocks")
        if num_blocks > self.num_available:
            raise OutOfBlocks(f"{num_blocks} KV blocks are needed and {self.num_available} are available")
        block_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def next_free(self, num_blocks: int) -> list[BlockId]:
        """Return the free blocks that :meth:`allocate` would take for the next ``num_blocks``, in order."""
        return self._free[: -num_blocks - 1 : -1]

    def share(self, block_ids: Sequence[BlockId]) -> None:
        """Add one reference to each of these held blocks; raises IntegrityError when one is not held."""
        self._require_held(block_ids)
        for block_id in block_ids:
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[BlockId]) -> None:
        """Drop one reference of each block, given in the order of their sequence.

        The last reference frees a block without a hash and leaves one with a hash as cache. Raises IntegrityError,
        and drops nothing, when a block is not held that often.
        """
        self._require_references(block_ids)
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._retire(block_id)

    def match(self, block_hashes: Iterable[BlockHash]) -> int:
        """Return how many leading hashes are in the pool now, without touching anything."""
        num_found = 0
        for block_hash in block_hashes:
            if block_hash not in self._entries:
                break
            num_found += 1
        return num_found

    def pin_prefix(self, block_hashes: Iterable[BlockHash]) -> list[BlockId]:
        """Find the longest leading run of hashes and take one reference to each of its blocks, in one step."""
        pinned: list[BlockId] = []
        for block_hash in block_hashes:
            entry = self._entries.get(block_hash)
            if entry is None:
                break
            if self._ref_counts[entry.block_id] == 0:
                self._unretire(entry.block_id)
            self._ref_counts[entry.block_id] += 1
            pinned.append(entry.block_id)
        return pinned

    def publish(
        self, block_id: BlockId, block_hash: BlockHash, *, parent: BlockHash | None = None, tenant: Tenant | None = None
    ) -> bool:
        """Let others find a held, full, computed block under ``block_hash``, which follows the block ``parent``.

        A hash that is already there keeps its first block and this one stays private. Returns whether lookups of the
        hash now find this block. Raises IntegrityError when the block is not held or carries another hash.
        """
        self._require_held((block_id,))
        current = self._hash_of[block_id]
        if current is not None and current != block_hash:
            raise IntegrityError(f"block {block_id} already carries another hash")
        if block_hash in self._entries:
            return self._entries[block_hash].block_id == block_id
        self._hash_of[block_id] = block_hash
        self._entries[block_hash] = CacheEntry(block_id, parent, tenant)
        self._log.record(CacheEvent(CacheChange.STORED, block_hash, block_id, parent))
        return True

    def withdraw(self, block_id: BlockId) -> None:
        """Take back the hash of a held block that its only holder is about to write; none is fine.

        Raises IntegrityError when others hold the block too: they rely on its content.
        """
        self._require_sole_holder((block_id,))
        self._forget_hash(block_id)

    def quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """Set blocks aside that somebody may still write to; drops the caller's reference.

        Raises IntegrityError, and changes nothing, when the caller is not the only holder of each.
        """
        self._require_sole_holder(block_ids)
        for block_id in block_ids:
            self._forget_hash(block_id)
            self._ref_counts[block_id] = 0
            self._quarantined.add(block_id)

    def end_quarantine(self, block_ids: Sequence[BlockId]) -> None:
        """Free blocks whose writer is known to have stopped; raises IntegrityError when one is not quarantined."""
        strangers = set(block_ids) - self._quarantined
        if strangers or len(set(block_ids)) != len(block_ids):
            raise IntegrityError(f"blocks {sorted(strangers) or list(block_ids)} are not quarantined once each")
        self._quarantined.difference_update(block_ids)
        self._free.extend(block_ids)

    def reset_cache(self) -> None:
        """Forget every hash, of held blocks too; blocks that were only cache become free."""
        idle = [*self._evictable, *self._kept_idle]
        for block_id in idle:
            self._unretire(block_id)
        for entry in list(self._entries.values()):
            self._forget_hash(entry.block_id)
        self._free.extend(idle)

    def keep(self, block_hashes: Iterable[BlockHash]) -> None:
        """Never evict the blocks of these hashes, and of no others; hashes that are not here yet count when they come.

        Raises OutOfBlocks, and changes nothing, when more than half of the pool would be kept.
        """
        wanted = set(block_hashes)
        if len(wanted) > self.num_blocks // 2:
            raise OutOfBlocks(f"{len(wanted)} blocks are to be kept, at most half of {self.num_blocks} can be")
        changed = wanted ^ self._kept
        self._kept = wanted
        for block_hash in changed & self._entries.keys():
            block_id = self._entries[block_hash].block_id
            if self._ref_counts[block_id] == 0:
                self._kept_idle.discard(block_id)
                if block_id in self._evictable:
                    self._evictable.remove(block_id)
                self._retire(block_id)

    def cached_blocks(self) -> dict[BlockHash, BlockId]:
        """Return a copy of what can be found: all published hashes with their blocks, held or cached."""
        return {block_hash: entry.block_id for block_hash, entry in self._entries.items()}

    def cached_entries(self) -> dict[BlockHash, CacheEntry]:
        """Return as :meth:`cached_blocks`, with each block's place in its chain."""
        return dict(self._entries)

    def on_cache_change(self, call: Callable[[], None]) -> None:
        """Call ``call`` when there is something to drain and there was nothing before; for the one follower."""
        self._log.on_first = call

    def drain_cache_events(self) -> CacheEvents:
        """Return what entered and left the cache since the last call."""
        return self._log.drain()

    def check_integrity(self, holders: Iterable[Iterable[BlockId]]) -> None:
        """Raise IntegrityError unless the books balance and references equal what ``holders`` name.

        Each holder (a table, a lease with its own references) yields its block ids. Linear in the size of the pool.
        """
        expected = Counter(block_id for holder in holders for block_id in holder)
        faults = [*self._state_faults(), *self._index_faults(), *self._reference_faults(expected)]
        if faults:
            more = f" and {len(faults) - _MAX_REPORTED} more" if len(faults) > _MAX_REPORTED else ""
            raise IntegrityError("; ".join(faults[:_MAX_REPORTED]) + more)

    def _evict(self) -> BlockId:
        block_id = self._evictable.pop_victim()
        self._forget_hash(block_id)
        self.num_evictions += 1
        return block_id

    def _retire(self, block_id: BlockId) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is None:
            self._free.append(block_id)
        elif block_hash in self._kept:
            self._kept_idle.add(block_id)
        else:
            self._evictable.add(block_id, self._entries[block_hash].tenant)

    def _unretire(self, block_id: BlockId) -> None:
        if block_id in self._kept_idle:
            self._kept_idle.remove(block_id)
        else:
            self._evictable.remove(block_id)

    def _forget_hash(self, block_id: BlockId) -> None:
        block_hash = self._hash_of[block_id]
        if block_hash is not None:
            self._hash_of[block_id] = None
            parent = self._entries.pop(block_hash).parent
            self._log.record(CacheEvent(CacheChange.REMOVED, block_hash, block_id, parent))

    def _require_held(self, block_ids: Sequence[BlockId]) -> None:
        for block_id in block_ids:
            if not 0 <= block_id < self.num_blocks or self._ref_counts[block_id] == 0:
                raise IntegrityError(f"block {block_id} is not held")

    def _require_references(self, block_ids: Sequence[BlockId]) -> None:
        self._require_held(block_ids)
        if len(set(block_ids)) == len(block_ids):
            return
        for block_id, num_dropped in Counter(block_ids).items():
            if num_dropped > self._ref_counts[block_id]:
                raise IntegrityError(f"block {block_id} is released {num_dropped} times and held less often")

    def _require_sole_holder(self, block_ids: Sequence[BlockId]) -> None:
        self._require_held(block_ids)
        for block_id in block_ids:
            if self._ref_counts[block_id] != 1:
                raise IntegrityError(f"block {block_id} has {self._ref_counts[block_id]} holders, not one")
        if len(set(block_ids)) != len(block_ids):
            raise IntegrityError("a block is named twice by its only holder")

    def _state_faults(self) -> Iterable[str]:
        states = Counter((*self._free, *self._evictable, *self._kept_idle, *self._quarantined))
        for block_id in range(self.num_blocks):
            idle = states[BlockId(block_id)]
            if idle > 1:
                yield f"block {block_id} is in {idle} states at once"
            if (idle == 0) != (self._ref_counts[block_id] > 0):
                yield f"block {block_id} has {self._ref_counts[block_id]} references and is idle in {idle} lists"
        outside = [block_id for block_id in states if not 0 <= block_id < self.num_blocks]
        if outside:
            yield f"blocks {outside} do not exist"

    def _index_faults(self) -> Iterable[str]:
        for block_hash, entry in self._entries.items():
            block_id = entry.block_id
            if block_id >= self.num_blocks or self._hash_of[block_id] != block_hash:
                yield f"hash {block_hash.hex()} leads to block {block_id}, which does not carry it"
        num_hashed = sum(block_hash is not None for block_hash in self._hash_of)
        if num_hashed != len(self._entries):
            yield f"{num_hashed} blocks carry a hash and {len(self._entries)} hashes lead to a block"
        idle = {*self._evictable, *self._kept_idle}
        for block_id in idle:
            if block_id < self.num_blocks and self._hash_of[block_id] is None:
                yield f"block {block_id} is cached without a hash"
        for index, carried in enumerate(self._hash_of):
            if carried is not None and not self._ref_counts[index] and BlockId(index) not in idle:
                yield f"block {index} is free or quarantined and carries a hash"

    def _reference_faults(self, expected: Counter[BlockId]) -> Iterable[str]:
        for index, ref_count in enumerate(self._ref_counts):
            if ref_count != expected[BlockId(index)]:
                yield f"block {index} has {ref_count} references and {expected[BlockId(index)]} holders"
        outside = [block_id for block_id in expected if not 0 <= block_id < self.num_blocks]
        if outside:
            yield f"holders name blocks {outside}, which do not exist"

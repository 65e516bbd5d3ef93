"""Which cached block goes first when room is needed.

The pool asks a :class:`Retention` for victims and tells it what becomes cached and what is used again; kept blocks
never come here. :class:`LeastRecentlyUsed` is the rule in use: least recently used first, but a tenant with more than
its cap pays before anybody else does, so that a flood of one-off prompts pushes out its own cache and not the others'.
The cap binds under pressure only: room that nobody else wants is not left empty.

Pure: knows no clock; the order of the calls is the time.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from common.ids import BlockHash, BlockId

Tenant = BlockHash
"""Who shares blocks with each other: the root of their hash chains, which the cache salt is part of."""


class Retention(Protocol):
    """The evictable blocks of one pool, and the rule that chooses among them."""

    def __len__(self) -> int:
        """Return how many blocks can be evicted."""
        ...

    def __contains__(self, block_id: object) -> bool:
        """Say whether the block can be evicted."""
        ...

    def __iter__(self) -> Iterator[BlockId]:
        """Yield every block that can be evicted."""
        ...

    def add(self, block_id: BlockId, tenant: Tenant | None) -> None:
        """Nobody uses the block any more, as of now."""
        ...

    def remove(self, block_id: BlockId) -> None:
        """The block is in use again, or gone."""
        ...

    def pop_victim(self) -> BlockId:
        """Take out and return the block that goes first; there is one."""
        ...


class LeastRecentlyUsed:
    """Owned by one pool. ``max_tenant_blocks`` is the cap; None is no cap."""

    def __init__(self, max_tenant_blocks: int | None = None) -> None:
        self._max_tenant_blocks = max_tenant_blocks
        self._tenant_of: OrderedDict[BlockId, Tenant | None] = OrderedDict()  # next victim first
        self._by_tenant: dict[Tenant | None, OrderedDict[BlockId, None]] = {}
        self._over_cap: OrderedDict[Tenant | None, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._tenant_of

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._tenant_of)

    def add(self, block_id: BlockId, tenant: Tenant | None) -> None:
        """Take the block as the most recently used one."""
        self._tenant_of[block_id] = tenant
        blocks = self._by_tenant.setdefault(tenant, OrderedDict())
        blocks[block_id] = None
        if self._max_tenant_blocks is not None and len(blocks) > self._max_tenant_blocks:
            self._over_cap[tenant] = None

    def remove(self, block_id: BlockId) -> None:
        """Forget the block; raises KeyError when it is not here."""
        tenant = self._tenant_of.pop(block_id)
        blocks = self._by_tenant[tenant]
        del blocks[block_id]
        if not blocks:
            del self._by_tenant[tenant]
        if self._max_tenant_blocks is not None and len(blocks) <= self._max_tenant_blocks:
            self._over_cap.pop(tenant, None)

    def pop_victim(self) -> BlockId:
        """Return the oldest block of a tenant over its cap, else the oldest of all; raises StopIteration when empty."""
        oldest = self._by_tenant[next(iter(self._over_cap))] if self._over_cap else self._tenant_of
        victim = next(iter(oldest))
        self.remove(victim)
        return victim

"""Which workers hold how much of a prompt: its hash chain, computed once, looked up in the cluster's prefix index.

What comes back is advice for the router, of the moment. Without Redis, or without a decode worker, nobody holds
anything.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from common.ids import BlockHash, WorkerId
from common.messages import Fingerprint, Role
from common.redis_client import RedisUnavailable
from gateway.router import ClusterView
from kvstore.prefix_hash import chain_hashes, root_hash
from kvstore.prefix_index import PrefixIndex

LOOKUP_TIMEOUT_S = 0.25
"""A lookup that takes longer is not worth waiting for."""

INLINE_TOKENS = 8192
"""Longer prompts are hashed on a thread, so that the event loop is not held up."""


@dataclass(frozen=True, slots=True)
class Located:
    """A prompt's blocks, and who holds how many of its leading tokens."""

    chain: Sequence[BlockHash] = ()
    block_size: int = 1
    num_tokens: Mapping[WorkerId, int] = field(default_factory=dict)
    """Leading tokens by worker; those that hold none are left out."""


class Locator:
    """Owned by the gateway; asks ``index`` about the workers in ``view``."""

    def __init__(self, index: PrefixIndex, view: Callable[[], ClusterView]) -> None:
        self.index = index
        self._view = view

    async def locate(self, token_ids: Sequence[int], cache_salt: str) -> Located:
        """Return who holds the blocks of ``token_ids``; never raises for Redis."""
        view = self._view()
        fingerprint = _fingerprint(view)
        if fingerprint is None:
            return Located()
        chain = await _hash(fingerprint, cache_salt, token_ids)
        records = [worker.record for worker in view.workers if worker.record.fingerprint == fingerprint]
        depths = [0] * len(records)
        if view.redis_is_up:
            try:
                async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                    depths = await self.index.depths(chain, [(record.worker_id, record.epoch) for record in records])
            except RedisUnavailable:
                pass  # whoever polls the registry says so
        held = zip(records, depths, strict=True)
        block_size = fingerprint.block_size
        return Located(chain, block_size, {record.worker_id: depth * block_size for record, depth in held if depth})


def _fingerprint(view: ClusterView) -> Fingerprint | None:
    """Return whose blocks a prompt is looked for in: the first decode worker's, by name."""
    records = [worker.record for worker in view.workers if worker.record.role is Role.DECODE]
    return min(records, key=lambda record: record.worker_id).fingerprint if records else None


async def _hash(fingerprint: Fingerprint, cache_salt: str, token_ids: Sequence[int]) -> list[BlockHash]:
    root = _root(fingerprint, cache_salt)
    if len(token_ids) <= INLINE_TOKENS:
        return chain_hashes(root, token_ids, fingerprint.block_size)
    return await asyncio.to_thread(chain_hashes, root, token_ids, fingerprint.block_size)


@lru_cache(maxsize=1024)
def _root(fingerprint: Fingerprint, cache_salt: str) -> BlockHash:
    return root_hash(fingerprint, cache_salt)

"""The physical blocks of one sequence, in order: token ``t`` lives in slot ``block_ids[t // block_size]``,
offset ``t % block_size``.

A table grows only when its sequence does, so at most the last block is partly filled. Full computed blocks are
published and then shared by hash. Forks share everything, the partly filled last block too; whoever writes into a
shared block calls :meth:`BlockTable.copy_on_write` first. Holds no KV bytes and no tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import BlockHash, BlockId
from kvstore.block_pool import BlockPool, IntegrityError
from kvstore.prefix_hash import PrefixHasher


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Bytes of block ``src`` that must be in block ``dst`` before the writer's next step.

    The table no longer holds ``src``. Make the copy before control returns to the event loop, or its other holders
    may release it and somebody else fill it.
    """

    src: BlockId
    dst: BlockId


class BlockTable:
    """One sequence's references into ``pool``. Owned by the sequence, used on the event loop only."""

    def __init__(self, pool: BlockPool, hasher: PrefixHasher) -> None:
        if pool.block_size != hasher.block_size:
            raise ValueError(f"the pool's blocks hold {pool.block_size} tokens, the hasher's {hasher.block_size}")
        self._pool = pool
        self._hasher = hasher
        self._block_ids: list[BlockId] = []
        self._num_published = 0

    @property
    def block_ids(self) -> Sequence[BlockId]:
        """The blocks in order; belongs to the table: read it, do not change it."""
        return self._block_ids

    @property
    def num_slots(self) -> int:
        """Tokens for which the table has room."""
        return len(self._block_ids) * self._pool.block_size

    def block_hashes(self, token_ids: Sequence[int]) -> Sequence[BlockHash]:
        """Return the hashes of all full blocks of ``token_ids``, in order; takes nothing."""
        return self._hasher.extend(token_ids)

    def cached_prefix(self, token_ids: Sequence[int]) -> int:
        """Return the leading tokens that :meth:`adopt_prefix` would find now; takes nothing."""
        hashes = self._hasher.extend(token_ids)
        return self._pool.match(hashes[: self._num_adoptable(token_ids)]) * self._pool.block_size

    def adopt_prefix(self, token_ids: Sequence[int]) -> int:
        """Pin the longest cached prefix of ``token_ids`` and return its tokens.

        At least one token is left to compute, since its logits are needed. The table must be empty.
        """
        if self._block_ids:
            raise IntegrityError("only an empty table can adopt a prefix")
        hashes = self._hasher.extend(token_ids)
        self._block_ids = self._pool.pin_prefix(hashes[: self._num_adoptable(token_ids)])
        self._num_published = len(self._block_ids)
        return self.num_slots

    def blocks_needed(self, num_tokens: int) -> int:
        """Return how many further blocks the table needs to hold ``num_tokens`` tokens."""
        return max(0, self._num_blocks_for(num_tokens) - len(self._block_ids))

    def grow(self, num_tokens: int) -> None:
        """Allocate what is missing to hold ``num_tokens``; raises OutOfBlocks and then changes nothing."""
        self._block_ids += self._pool.allocate(self.blocks_needed(num_tokens))

    def publish(self, token_ids: Sequence[int], num_computed: int) -> None:
        """Let others find the full blocks among the first ``num_computed`` tokens, whose KV is in place.

        ``token_ids`` are the tokens of the whole sequence, at least ``num_computed`` of them.
        """
        if num_computed > len(token_ids) or num_computed > self.num_slots:
            raise IntegrityError(
                f"{num_computed} tokens cannot be computed of {len(token_ids)}, with {self.num_slots} slots"
            )
        num_full = num_computed // self._pool.block_size
        if num_full <= self._num_published:
            return
        hashes = self._hasher.extend(token_ids)
        for index in range(self._num_published, num_full):
            parent = hashes[index - 1] if index else None
            self._pool.publish(self._block_ids[index], hashes[index], parent=parent, tenant=self._hasher.root)
        self._num_published = num_full

    def is_shared(self, position: int) -> bool:
        """Whether the block of the token at ``position`` is there and has other holders."""
        index = position // self._pool.block_size
        return index < len(self._block_ids) and self._pool.ref_count(self._block_ids[index]) > 1

    def copy_on_write(self, position: int) -> BlockCopy | None:
        """Make the block of the token at ``position`` this table's own, before the first write to it.

        A block with other holders is swapped for a fresh one and the copy to make is returned; raises OutOfBlocks and
        then changes nothing. A block of its own is ready; a hash it carries is withdrawn.
        """
        index = position // self._pool.block_size
        src = self._block_ids[index]
        self._num_published = min(self._num_published, index)
        if self._pool.ref_count(src) == 1:
            self._pool.withdraw(src)
            return None
        (dst,) = self._pool.allocate(1)
        self._block_ids[index] = dst
        self._pool.release((src,))
        return BlockCopy(src, dst)

    def fork(self) -> "BlockTable":
        """Return a second table over the same blocks; nothing is copied."""
        twin = BlockTable(self._pool, self._hasher.fork())
        self._pool.share(self._block_ids)
        twin._block_ids = self._block_ids.copy()
        twin._num_published = self._num_published
        return twin

    def truncate(self, num_tokens: int) -> None:
        """Release the blocks past ``num_tokens``; other tokens may follow (after :meth:`copy_on_write`)."""
        num_kept = self._num_blocks_for(num_tokens)
        released, self._block_ids = self._block_ids[num_kept:], self._block_ids[:num_kept]
        self._pool.release(released)
        self._hasher.truncate(num_tokens)
        self._num_published = min(self._num_published, num_tokens // self._pool.block_size)

    def release(self) -> None:
        """Give all blocks back, published ones as cache. Safe to call again."""
        released, self._block_ids = self._block_ids, []
        self._num_published = 0
        self._pool.release(released)

    def quarantine(self) -> list[BlockId]:
        """Empty the table although a writer may still be at work, and return the blocks that are set aside.

        Published and shared blocks are complete, so they are only released. The caller hands the result to
        ``pool.end_quarantine`` once the writer has stopped.
        """
        at_risk = [block_id for block_id in self._block_ids if self._is_private(block_id)]
        complete = [block_id for block_id in self._block_ids if not self._is_private(block_id)]
        self._block_ids = []
        self._num_published = 0
        self._pool.quarantine(at_risk)
        self._pool.release(complete)
        return at_risk

    def _is_private(self, block_id: BlockId) -> bool:
        return self._pool.ref_count(block_id) == 1 and self._pool.block_hash(block_id) is None

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)

    def _num_adoptable(self, token_ids: Sequence[int]) -> int:
        return max(0, len(token_ids) - 1) // self._pool.block_size

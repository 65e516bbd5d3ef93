"""The prefixes that prompts of this gateway share, by the tokens that they have saved.

A prefix enters when a prompt is first found to have it cached; from then on every prompt that begins with it counts.
Bounded: of more, the least recently used is forgotten. Pure: time is an argument. Knows hashes and token ids, no text.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from common.ids import BlockHash

MAX_PREFIXES = 4096
HEAD_TOKENS = 48
"""First tokens of a prefix that are remembered, for people."""


@dataclass(slots=True)
class SharedPrefix:
    """One prefix and what it has saved. Owned by the ledger."""

    block_hash: BlockHash
    """Of its last block."""
    num_tokens: int
    head: tuple[int, ...]
    num_requests: int
    """Prompts that began with it, the one that brought it included."""
    num_hits: int
    """Of those, the ones that found it cached."""
    saved_tokens: int
    used_at: float

    @property
    def hit_rate(self) -> float:
        """Share of the prompts with this prefix that found it cached."""
        return round(self.num_hits / self.num_requests, 6)


class PrefixLedger:
    """Owned by the gateway."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        self._prefixes: OrderedDict[BlockHash, SharedPrefix] = OrderedDict()

    def begun(
        self, token_ids: Sequence[int], chain: Sequence[BlockHash], cached_blocks: int, block_size: int, now: float
    ) -> None:
        """A prompt begins, of whose ``chain`` the first ``cached_blocks`` were cached."""
        found: SharedPrefix | None = None
        for depth, block_hash in enumerate(chain, start=1):
            prefix = self._prefixes.get(block_hash)
            if prefix is None:
                continue
            self._prefixes.move_to_end(block_hash)
            prefix.num_requests += 1
            prefix.used_at = now
            if depth <= cached_blocks:
                prefix.num_hits += 1
                found = prefix
        if not cached_blocks or cached_blocks > len(chain):
            return
        block_hash = chain[cached_blocks - 1]
        if found is None or found.block_hash != block_hash:
            head = tuple(token_ids[:HEAD_TOKENS])
            found = SharedPrefix(block_hash, cached_blocks * block_size, head, 2, 1, 0, now)
            self._prefixes[block_hash] = found
            if len(self._prefixes) > self._max_prefixes:
                self._prefixes.popitem(last=False)
        found.saved_tokens += cached_blocks * block_size

    def top(self, count: int) -> list[SharedPrefix]:
        """Return the ``count`` prefixes that have saved most tokens."""
        return sorted(self._prefixes.values(), key=lambda prefix: -prefix.saved_tokens)[:count]

    def clear(self) -> None:
        """Forget all of them."""
        self._prefixes.clear()

"""Builders of sequences over a real pool, for scheduler tests."""

import itertools

from common.ids import BlockHash, RequestId
from common.sampling import SamplingParams
from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockTable
from kvstore.prefix_hash import PrefixHasher
from kvstore.sequence import Sequence

ROOT = BlockHash(b"0" * 16)
_ids = itertools.count()


def new_sequence(pool: BlockPool, token_ids: list[int], max_tokens: int = 8, *, priority: int = 0) -> Sequence:
    """Return a sequence with an empty table over ``pool``."""
    table = BlockTable(pool, PrefixHasher(ROOT, pool.block_size))
    sampling = SamplingParams(max_tokens, priority=priority)
    return Sequence(RequestId(f"r{next(_ids)}"), list(token_ids), len(token_ids), sampling, table)


def unique_tokens(num_tokens: int, start: int = 0) -> list[int]:
    """Return tokens that share no prefix with those of another ``start``."""
    return list(range(start * 100_000, start * 100_000 + num_tokens))

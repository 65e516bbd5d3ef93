"""The content hash of a block: equal hashes mean equal tokens from the start of the sequence, on the same model.

    hash_i = blake2b-128(hash_{i-1} || tokens_i as little-endian uint32)
    hash_{-1} = blake2b-128, personalised, over length-prefixed {format version, model, KV shape, KV dtype,
                quantisation, block size, cache salt, adapter}

The same in every process and release; a test pins golden vectors, and ``FORMAT`` changes with the rule. Knows nothing
of blocks or pools.
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence

from common.errors import InvalidRequest
from common.ids import BlockHash
from common.messages import Fingerprint

FORMAT = "1"
"""Version of the rule; part of the root."""

DIGEST_BYTES = 16

_ROOT_TAG = b"baton-kv-root"


def root_hash(fingerprint: Fingerprint, cache_salt: str, adapter: str = "") -> BlockHash:
    """Return the hash that every chain of this model, salt and adapter starts from."""
    fields = (
        FORMAT,
        fingerprint.model,
        fingerprint.kv_shape,
        fingerprint.kv_dtype,
        fingerprint.quantization,
        str(fingerprint.block_size),
        cache_salt,
        adapter,
    )
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES, person=_ROOT_TAG)
    for field in fields:
        data = field.encode()
        digest.update(struct.pack("<Q", len(data)) + data)
    return BlockHash(digest.digest())


def chain_hashes(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Return the hashes of the full blocks of ``token_ids``, which follow the block ``parent``; a rest is left out."""
    num_blocks = len(token_ids) // block_size
    num_tokens = num_blocks * block_size
    words = struct.pack(f"<{num_tokens}I", *token_ids[:num_tokens])
    stride = block_size * 4
    hashes: list[BlockHash] = []
    for start in range(0, num_blocks * stride, stride):
        parent = BlockHash(hashlib.blake2b(parent + words[start : start + stride], digest_size=DIGEST_BYTES).digest())
        hashes.append(parent)
    return hashes


def join_chain(block_hashes: Iterable[BlockHash]) -> bytes:
    """Return the hashes of a chain as messages and the index carry them."""
    return b"".join(block_hashes)


def split_chain(chain: bytes) -> list[BlockHash]:
    """Return the hashes of which ``chain`` is made; raises InvalidRequest when it is not made of whole ones."""
    if len(chain) % DIGEST_BYTES:
        raise InvalidRequest(f"a chain of {len(chain)} bytes is not made of hashes of {DIGEST_BYTES} bytes")
    return [BlockHash(chain[start : start + DIGEST_BYTES]) for start in range(0, len(chain), DIGEST_BYTES)]


class PrefixHasher:
    """The hashes of one growing sequence; each token is hashed once. Owned by the sequence's block table."""

    def __init__(self, root: BlockHash, block_size: int) -> None:
        self.block_size = block_size
        self.root = root
        self._hashes: list[BlockHash] = []

    def extend(self, token_ids: Sequence[int]) -> Sequence[BlockHash]:
        """Return the hashes of all full blocks of the sequence, whose tokens so far are ``token_ids``.

        Only blocks that were not hashed before are hashed now, so what was given before must be a prefix of
        ``token_ids``, or the other way round. The result belongs to the hasher: read it, do not keep it.
        """
        num_full = len(token_ids) // self.block_size
        num_known = len(self._hashes)
        if num_full > num_known:
            parent = self._hashes[-1] if self._hashes else self.root
            fresh = token_ids[num_known * self.block_size : num_full * self.block_size]
            self._hashes += chain_hashes(parent, fresh, self.block_size)
        return self._hashes if num_full >= num_known else self._hashes[:num_full]

    def truncate(self, num_tokens: int) -> None:
        """Forget the blocks that reach past ``num_tokens``, because other tokens will follow."""
        del self._hashes[num_tokens // self.block_size :]

    def fork(self) -> "PrefixHasher":
        """Return an independent hasher of the same tokens."""
        twin = PrefixHasher(self.root, self.block_size)
        twin._hashes = self._hashes.copy()
        return twin

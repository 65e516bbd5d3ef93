"""Counts in tokens what prefix caches save a worker's prompts, once a prompt, when it is first admitted.

A hit's source is where its KV came from: ``local``, the cache of the prefill worker that computed the rest; ``peer``,
pulled from another prefill worker; ``decode``, the cache of a decode worker, which computed the rest itself or was
pulled from. The time that a hit saves goes by this worker's measured rate; hits before it has one stay unpriced.
Prompts that had begun elsewhere, and what is computed again after a preemption, are not counted.
"""

from common.messages import PeerPrefix, Role


class HitCounter:
    """Owned by the engine of one role."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._queries = 0
        self._hits = 0
        self._hits_peer = 0
        self._hits_decode = 0
        self._saved_ms = 0.0
        self._unpriced = 0

    def count(
        self, num_tokens: int, cached_tokens: int, *, fetched_tokens: int, peer: PeerPrefix | None, tokens_per_s: float
    ) -> None:
        """A prompt of ``num_tokens`` begins; ``cached_tokens`` need not be computed, of them some were just fetched."""
        fetched = min(fetched_tokens, cached_tokens) if peer is not None else 0
        own = cached_tokens - fetched
        self._queries += num_tokens
        self._hits += cached_tokens
        if peer is not None and peer.role is Role.PREFILL:
            self._hits_peer += fetched
        else:
            self._hits_decode += fetched
        if self._role is Role.DECODE:
            self._hits_decode += own
        if tokens_per_s:
            self._saved_ms += 1000 * cached_tokens / tokens_per_s
        else:
            self._unpriced += cached_tokens

    def counters(self) -> dict[str, int]:
        """Return counts since the start, by metric name."""
        return {
            "prefix_cache_queries": self._queries,
            "prefix_cache_hits": self._hits,
            "prefix_cache_hits_peer": self._hits_peer,
            "prefix_cache_hits_decode": self._hits_decode,
            "prefix_cache_saved_ms": int(self._saved_ms),
            "prefix_cache_unpriced": self._unpriced,
        }

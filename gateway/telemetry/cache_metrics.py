"""The workers' prefix-cache counts for Prometheus: in tokens, by role and source, lives that are over included."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages import Role
from gateway.telemetry.cache_ledger import CacheLedger, total


class CacheMetrics(Collector):
    """Reads the ledger at each scrape."""

    def __init__(self, ledger: CacheLedger) -> None:
        self._ledger = ledger

    def collect(self) -> Iterator[Metric]:
        """Yield queries by role, and hits by role and source."""
        queries = CounterMetricFamily("baton_cache_query_tokens", "Prompt tokens looked up", labels=("role",))
        hits = CounterMetricFamily("baton_cache_hit_tokens", "Prompt tokens not computed", labels=("role", "source"))
        saved = CounterMetricFamily("baton_cache_saved_seconds", "Prefill time that hits saved", labels=("role",))
        workers = self._ledger.counts(0.0, None)
        for role in Role:
            counts = total(worker for worker in workers if worker.role is role)
            queries.add_metric([role], counts.queries)
            saved.add_metric([role], counts.saved_ms / 1000)
            for source in ("local", "peer", "decode"):
                hits.add_metric([role, source], getattr(counts, source))
        yield from (queries, hits, saved)

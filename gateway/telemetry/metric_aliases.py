"""The same numbers under vLLM's names, which dashboards and the Kubernetes inference gateway read.

One gateway stands for one engine, so ``engine`` is always "0": gauges are sums over the decode workers, everything else
is what this gateway has measured.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from common.messages import Role, WorkerRecord
from gateway.router import ClusterView

_SAME_MEANING = {
    "baton_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "baton_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "baton_request_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "baton_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "baton_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "baton_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "baton_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "baton_request_prompt_tokens": "vllm:request_prompt_tokens",
    "baton_request_generation_tokens": "vllm:request_generation_tokens",
    "baton_prompt_tokens": "vllm:prompt_tokens",
    "baton_generation_tokens": "vllm:generation_tokens",
    "baton_finished_requests": "vllm:request_success",
    "baton_prefix_cache_queries": "vllm:prefix_cache_queries",
    "baton_prefix_cache_hits": "vllm:prefix_cache_hits",
}

_DROPPED_LABELS = {"role"}
"""Labels that vLLM's metric lacks; samples that differ only in them are added up."""

_PREEMPTIONS = "preemptions"
"""The workers' counter of preempted sequences."""


class MetricAliases(Collector):
    """Reads the gateway's own ``registry`` and the ``view`` of the workers at each scrape."""

    def __init__(self, registry: CollectorRegistry, view: Callable[[], ClusterView], model_name: str) -> None:
        self._registry = registry
        self._view = view
        self._labels = {"model_name": model_name, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        """Yield everything under its vLLM name."""
        for metric in self._registry.collect():
            if metric.name in _SAME_MEANING:
                yield self._renamed(metric, _SAME_MEANING[metric.name])
        records = [worker.record for worker in self._view().workers if worker.record.role is Role.DECODE]
        yield self._gauge("num_requests_running", "Sequences that run", sum(r.load.running for r in records))
        yield self._gauge("num_requests_waiting", "Sequences that wait", sum(r.load.waiting for r in records))
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", _block_usage(records))
        yield self._preemptions(records)
        yield self._cache_config(records)

    def _renamed(self, metric: Metric, name: str) -> Metric:
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in metric.samples:
            if sample.name.endswith("_created"):
                continue
            labels = {key: value for key, value in sample.labels.items() if key not in _DROPPED_LABELS}
            key = (name + sample.name.removeprefix(metric.name), tuple((self._labels | labels).items()))
            sums[key] = sums.get(key, 0.0) + sample.value
        renamed = Metric(name, metric.documentation, metric.type)
        renamed.samples = [Sample(sample_name, dict(labels), value) for (sample_name, labels), value in sums.items()]
        return renamed

    def _gauge(self, name: str, help_text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", help_text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), value)
        return family

    def _preemptions(self, records: list[WorkerRecord]) -> CounterMetricFamily:
        family = CounterMetricFamily("vllm:num_preemptions", "Preempted sequences", labels=tuple(self._labels))
        total = sum(record.counters.get(_PREEMPTIONS, 0) for record in records)
        family.add_metric(tuple(self._labels.values()), total)
        return family

    def _cache_config(self, records: list[WorkerRecord]) -> GaugeMetricFamily:
        labels = (*self._labels, "block_size", "num_gpu_blocks")
        family = GaugeMetricFamily("vllm:cache_config_info", "Layout of the KV pool", labels=labels)
        if records:
            num_blocks = sum(record.blocks.total for record in records)
            values = (*self._labels.values(), str(records[0].fingerprint.block_size), str(num_blocks))
            family.add_metric(values, 1)
        return family


def _block_usage(records: list[WorkerRecord]) -> float:
    total = sum(record.blocks.total for record in records)
    return sum(record.blocks.held for record in records) / total if total else 0.0

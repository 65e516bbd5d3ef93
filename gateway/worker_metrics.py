"""The workers' records as metrics: gauges of their state, and every counter that they report.

A counter named ``x`` in a record becomes ``baton_worker_x_total{worker, role}``.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.messages import WorkerRecord
from gateway.router import ClusterView, WorkerView

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")
_LABELS = ("worker", "role")


class WorkerMetrics(Collector):
    """Reads ``view`` at each scrape."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all workers."""
        view = self._view()
        records = [worker.record for worker in view.workers]
        yield _single("redis_up", "Whether Redis answered the last time", float(view.redis_is_up))
        yield _up(view.workers)
        yield _gauge("running", "Sequences that run", records, lambda record: record.load.running)
        yield _gauge("waiting", "Sequences that wait", records, lambda record: record.load.waiting)
        yield _gauge("queued_tokens", "Prompt tokens to compute", records, lambda record: record.load.queued_tokens)
        yield _gauge("tokens_per_second", "Prompt tokens a second", records, lambda record: record.load.tokens_per_s)
        yield _gauge("tick_age_seconds", "Age of the last step", records, lambda record: record.load.tick_age_s)
        yield _blocks(records)
        yield _slots(records)
        yield from _counters(records)


def _single(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"baton_{name}", help_text, value=value)


def _gauge(
    name: str, help_text: str, records: Iterable[WorkerRecord], value: Callable[[WorkerRecord], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"baton_worker_{name}", help_text, labels=_LABELS)
    for record in records:
        family.add_metric([record.worker_id, record.role], value(record))
    return family


def _up(workers: Iterable[WorkerView]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("baton_worker_up", "Whether the worker is connected", labels=(*_LABELS, "state"))
    for worker in workers:
        record = worker.record
        family.add_metric([record.worker_id, record.role, record.state], float(worker.connected))
    return family


def _blocks(records: Iterable[WorkerRecord]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("baton_worker_blocks", "KV blocks by state", labels=(*_LABELS, "state"))
    for record in records:
        for state in ("free", "cached", "held", "quarantined"):
            family.add_metric([record.worker_id, record.role, state], getattr(record.blocks, state))
    return family


def _slots(records: Iterable[WorkerRecord]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("baton_worker_slots", "Token slots of held blocks", labels=(*_LABELS, "kind"))
    for record in records:
        for kind in ("allocated", "used"):
            family.add_metric([record.worker_id, record.role, kind], getattr(record.slots, kind))
    return family


def _counters(records: Iterable[WorkerRecord]) -> Iterator[CounterMetricFamily]:
    families: dict[str, CounterMetricFamily] = {}
    for record in records:
        for counter, value in record.counters.items():
            name = f"baton_worker_{_NOT_IN_A_NAME.sub('_', counter).removesuffix('_total')}"
            if name not in families:
                families[name] = CounterMetricFamily(name, f"The workers' counter {counter}", labels=_LABELS)
            families[name].add_metric([record.worker_id, record.role], value)
    yield from families.values()

"""Workers' records as Prometheus metrics: gauges of their state, and every counter that they report.

A counter named ``x`` in a record becomes ``baton_worker_x_total{worker, role}``. A gateway shows those of all workers,
a worker its own.
"""

import re
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from common.messages import WorkerRecord

WORKER_LABELS = ("worker", "role")

_NOT_IN_A_NAME = re.compile(r"[^a-zA-Z0-9_]")


def record_metrics(records: Iterable[WorkerRecord]) -> Iterator[Metric]:
    """Yield the metrics of ``records``, one sample a worker in each."""
    records = tuple(records)
    yield _gauge("running", "Sequences that run", records, lambda record: record.load.running)
    yield _gauge("waiting", "Sequences that wait", records, lambda record: record.load.waiting)
    yield _gauge("queued_tokens", "Prompt tokens to compute", records, lambda record: record.load.queued_tokens)
    yield _gauge("tokens_per_second", "Prompt tokens a second", records, lambda record: record.load.tokens_per_s)
    yield _gauge(
        "tick_age_seconds",
        "Seconds for which the running step is overdue",
        records,
        lambda record: record.load.tick_age_s,
    )
    yield _blocks(records)
    yield _slots(records)
    yield from _counters(records)


def single(name: str, help_text: str, value: float) -> GaugeMetricFamily:
    """Return a gauge of one value without labels."""
    return GaugeMetricFamily(f"baton_{name}", help_text, value=value)


def _gauge(
    name: str, help_text: str, records: Iterable[WorkerRecord], value: Callable[[WorkerRecord], float]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"baton_worker_{name}", help_text, labels=WORKER_LABELS)
    for record in records:
        family.add_metric([record.worker_id, record.role], value(record))
    return family


def _blocks(records: Iterable[WorkerRecord]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("baton_worker_blocks", "KV blocks by state", labels=(*WORKER_LABELS, "state"))
    for record in records:
        for state in ("free", "cached", "held", "quarantined"):
            family.add_metric([record.worker_id, record.role, state], getattr(record.blocks, state))
    return family


def _slots(records: Iterable[WorkerRecord]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("baton_worker_slots", "Token slots of held blocks", labels=(*WORKER_LABELS, "kind"))
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
                families[name] = CounterMetricFamily(name, f"The workers' counter {counter}", labels=WORKER_LABELS)
            families[name].add_metric([record.worker_id, record.role], value)
    yield from families.values()

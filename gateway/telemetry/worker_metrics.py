"""The workers as a gateway sees them, for Prometheus: what their records say, and whether they can be reached."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.worker_metrics import WORKER_LABELS, record_metrics, single
from gateway.router import ClusterView, WorkerView


class WorkerMetrics(Collector):
    """Reads ``view`` at each scrape."""

    def __init__(self, view: Callable[[], ClusterView]) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all workers."""
        view = self._view()
        yield single("redis_up", "Whether Redis answered the last time", float(view.redis_is_up))
        yield _up(view.workers)
        yield from record_metrics(worker.record for worker in view.workers)


def _up(workers: Iterable[WorkerView]) -> GaugeMetricFamily:
    labels = (*WORKER_LABELS, "state")
    family = GaugeMetricFamily("baton_worker_up", "Whether the worker is connected", labels=labels)
    for worker in workers:
        record = worker.record
        family.add_metric([record.worker_id, record.role, record.state], float(worker.connected))
    return family

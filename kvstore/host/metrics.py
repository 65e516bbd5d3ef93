"""What a worker measures about itself, for Prometheus, beside what its record tells everybody.

It has no metrics under vLLM's names: those are a gateway's, which stands for the whole, and sums would count twice.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from common.messages import WorkerRecord
from common.worker_metrics import record_metrics

STEP_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10),
)
SEQUENCE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TRANSFER_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 30, 60),
    120,
)


class HostMetrics:
    """One worker's registry. Owned by the host; written on the event loop."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody reads
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._step = self._histogram("worker_step_seconds", "One step of the model", STEP_BUCKETS)
        self._batch = self._histogram("worker_step_sequences", "Sequences in a step", SEQUENCE_BUCKETS)
        self._transfer = self._histogram(
            "kv_transfer_seconds", "A pull of blocks, from its begin to its last frame", TRANSFER_BUCKETS
        )
        self._transfers = Counter(
            "baton_kv_transfers", "Pulls of blocks by how they ended", ("result",), registry=self.registry
        )
        self._shown: Collector | None = None
        for result in ("complete", "failed"):
            self._transfers.labels(result)

    def stepped(self, elapsed_s: float, num_sequences: int) -> None:
        """A step has ended."""
        self._step.observe(elapsed_s)
        self._batch.observe(num_sequences)

    def pulled(self, elapsed_s: float, is_complete: bool) -> None:
        """A pull has ended; those that failed are counted, their durations say nothing."""
        self._transfers.labels("complete" if is_complete else "failed").inc()
        if is_complete:
            self._transfer.observe(elapsed_s)

    def show(self, record: Callable[[], WorkerRecord]) -> None:
        """From now on, show what ``record`` returns too, instead of what was shown before."""
        if self._shown is not None:
            self.registry.unregister(self._shown)
        self._shown = _RecordMetrics(record)
        self.registry.register(self._shown)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"baton_{name}", help_text, buckets=buckets, registry=self.registry)


class _RecordMetrics(Collector):
    """Reads the worker's record at each scrape."""

    def __init__(self, record: Callable[[], WorkerRecord]) -> None:
        self._record = record

    def collect(self) -> Iterator[Metric]:
        yield from record_metrics([self._record()])

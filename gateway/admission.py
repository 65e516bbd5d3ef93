"""The door: how many answers are written at a time, whether the cluster can take more, and whether any are taken."""

from collections.abc import Sequence

from common.errors import InvalidRequest, Overloaded, Unavailable
from gateway.capacity import Backlog, check_room, check_time
from gateway.telemetry.metrics import Metrics
from gateway.workers.cluster import Cluster

RETRY_AFTER_S = 1.0
"""What a client is told to wait when there is no room."""


class Admission:
    """Counts the answers in flight. Owned by the gateway; full means refused, nothing waits here."""

    def __init__(self, max_requests: int, ttft_target_s: float, metrics: Metrics) -> None:
        self.backlog = Backlog()
        self.is_draining = False
        self._max_requests = max_requests
        self._ttft_target_s = ttft_target_s
        self._in_flight = 0
        self._metrics = metrics

    @property
    def in_flight(self) -> int:
        """Answers in flight."""
        return self._in_flight

    def enter(self) -> "Ticket":
        """Take one place; raises Unavailable while draining and Overloaded when there is none."""
        if self.is_draining:
            self._metrics.rejected.labels("draining").inc()
            raise Unavailable("the gateway is shutting down", retry_after_s=RETRY_AFTER_S)
        ticket = Ticket(self)
        ticket.extend(1)
        return ticket

    def check_capacity(self, cluster: Cluster, sizes: Sequence[tuple[int, int, int]]) -> None:
        """Raise Overloaded unless the cluster can take prompts of these (prompt tokens, tokens of an answer at most,
        answers)."""
        view, needed = cluster.view(), sum(self.backlog.expected(*size) for size in sizes)
        try:
            check_time(view, cluster.limits, self.backlog, self._ttft_target_s)
        except Overloaded:
            self._metrics.rejected.labels("ttft_target").inc()
            raise
        try:
            check_room(view, cluster.limits, self.backlog, needed)
        except Overloaded:
            self._metrics.rejected.labels("kv_capacity").inc()
            raise

    def take(self, places: int) -> None:
        """Take ``places`` more; raises Overloaded when there are not so many."""
        if self._in_flight + places > self._max_requests:
            self._metrics.rejected.labels("max_requests").inc()
            raise Overloaded(
                f"{self._max_requests} answers are being written already, which is the limit",
                retry_after_s=RETRY_AFTER_S,
            )
        self._in_flight += places
        self._metrics.requests_in_flight.set(self._in_flight)

    def give_back(self, places: int) -> None:
        """Free ``places``."""
        self._in_flight -= places
        self._metrics.requests_in_flight.set(self._in_flight)

    def check_possible(self, places: int) -> None:
        """Raise InvalidRequest when not even an idle gateway has so many places."""
        if places > self._max_requests:
            raise InvalidRequest(
                f"{places} answers are asked for; at most {self._max_requests} can be written at a time", param="prompt"
            )


class Ticket:
    """The places of one HTTP request; given back once."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._places = 0

    def extend(self, places: int) -> None:
        """Take further places; raises as :meth:`Admission.take`, and InvalidRequest when that can never succeed."""
        self._admission.check_possible(self._places + places)
        self._admission.take(places)
        self._places += places

    def release(self) -> None:
        """Give all places back; does nothing the second time."""
        places, self._places = self._places, 0
        if places:
            self._admission.give_back(places)

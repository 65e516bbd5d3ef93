"""What a gateway measures about requests, under its own names; see :mod:`gateway.telemetry.metric_aliases` for vLLM's.

Times are as a client sees them, up to the network. Time per output token excludes the first token. Prefix-cache counts
are in tokens, once a prompt, by the role of the worker that computed it; what is computed again after a move or a
preemption is not counted.
"""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.messages import PlanKind
from common.sampling import FinishReason
from gateway.router import PlanChoice

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640),
    2560,
)
ITL_BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.075, 0.1, 0.15, 0.2),
    *(0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
LATENCY_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920),
    7680,
)
TOKEN_BUCKETS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


class Metrics:
    """All of a gateway's own metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests_in_flight = self._gauge("requests_in_flight", "Answers that this gateway is serving")
        self.dashboard_viewers = self._gauge("dashboard_viewers", "Open streams of the dashboard")
        self.http_requests = self._counter("http_requests", "Answered HTTP requests", ("handler", "method", "status"))
        self.rejected = self._counter("rejected_requests", "Requests refused at the door", ("reason",))
        self.disconnects = self._counter("client_disconnects", "Clients that left before their answer ended")
        self.routes = self._counter("routes", "Plans for prompts", ("plan", "reason"))
        self.migrations = self._counter("migrations", "Answers that moved to another decode worker")
        self.finished = self._counter("finished_requests", "Answers that ended by themselves", ("finished_reason",))
        self.failed = self._counter("failed_requests", "Answers that ended with an error", ("type",))
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted prompts")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers")
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in a cache", ("role",))
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in a cache", ("role",))
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token", TTFT_BUCKETS)
        self.itl = self._histogram("inter_token_latency_seconds", "Between tokens of an answer", ITL_BUCKETS)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean of an answer, without its first token", ITL_BUCKETS
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the last token", LATENCY_BUCKETS)
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to the prompt's first work", LATENCY_BUCKETS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From the prompt's first work to the first token", LATENCY_BUCKETS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the last", LATENCY_BUCKETS
        )
        self.prompt_length = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKEN_BUCKETS)
        self.answer_length = self._histogram("request_generation_tokens", "Tokens of an answer", TOKEN_BUCKETS)

    # ---- events ----

    def planned(self, choice: PlanChoice) -> None:
        """A prompt's computation was given to somebody."""
        self.routes.labels(choice.kind, choice.reason).inc()

    def begun(self, kind: PlanKind, num_prompt_tokens: int, cached_tokens: int, queue_s: float) -> None:
        """Work on a prompt has begun, for the first time."""
        role = "prefill" if kind is PlanKind.REMOTE else "decode"
        self.cache_queries.labels(role).inc(num_prompt_tokens)
        self.cache_hits.labels(role).inc(cached_tokens)
        self.queue_time.observe(queue_s)

    def first_token(self, since_arrival_s: float, since_begun_s: float) -> None:
        """The first token of an answer has come."""
        self.ttft.observe(since_arrival_s)
        self.prefill_time.observe(since_begun_s)

    def further_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Further tokens have come together, ``gap_s`` after those before."""
        for _ in range(num_tokens):
            self.itl.observe(gap_s / num_tokens)

    def answered(self, reason: FinishReason, num_output_tokens: int, decode_s: float) -> None:
        """One answer is complete."""
        self.finished.labels(reason).inc()
        self.answer_length.observe(num_output_tokens)
        self.decode_time.observe(decode_s)
        if num_output_tokens > 1:
            self.tpot.observe(decode_s / (num_output_tokens - 1))

    def ended(self, num_prompt_tokens: int, e2e_s: float) -> None:
        """All answers to a prompt are complete."""
        self.prompt_length.observe(num_prompt_tokens)
        self.e2e.observe(e2e_s)

    # ---- construction ----

    def _counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(f"baton_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str) -> Gauge:
        return Gauge(f"baton_{name}", help_text, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"baton_{name}", help_text, buckets=buckets, registry=self.registry)

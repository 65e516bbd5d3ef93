"""What the planner sees and decides, as metrics of the gateway."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from gateway.planner.planner import Decision
from gateway.planner.pressure import Pressure


class PlannerMetrics:
    """Owned by the planner's runner; in the gateway's own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._pressure = Gauge(
            "baton_planner_pressure",
            "How hard a pool is pressed; 1 is where the target is missed",
            ("pool", "part"),
            registry=registry,
        )
        self._local_tokens = Gauge(
            "baton_local_prefill_tokens", "Prompts up to here are prefilled where they are decoded", registry=registry
        )
        self._plans = Gauge("baton_planner_leader", "Whether this gateway plans", registry=registry)
        self._decisions = Counter(
            "baton_planner_decisions", "Decisions of the planner", ("action", "reason"), registry=registry
        )

    def looked(self, seen: Pressure, local_prefill_tokens: int, *, plans: bool) -> None:
        """A look at the cluster; what cannot be known keeps its last value."""
        self._local_tokens.set(local_prefill_tokens)
        self._plans.set(plans)
        if seen.missing:
            return
        self._pressure.labels("prefill", "wait").set(seen.prefill_wait)
        self._pressure.labels("prefill", "busy").set(seen.prefill_busy)
        self._pressure.labels("decode", "kv_use").set(seen.kv_use)
        self._pressure.labels("decode", "itl").set(seen.itl)
        self._pressure.labels("decode", "admission").set(seen.admission)

    def decided(self, decision: Decision) -> None:
        """A decision was made."""
        self._decisions.labels(decision.action, decision.reason).inc()

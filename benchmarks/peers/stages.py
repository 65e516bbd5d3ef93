"""Where Baton's time to a first token goes, from its own metrics: waiting, computing, and who computed."""

from collections import Counter

import httpx2
from prometheus_client.parser import text_string_to_metric_families

_STAGES = {"queue": "baton_request_queue_time_seconds", "prefill": "baton_request_prefill_time_seconds"}
_ROUTES = "baton_routes_total"


class StageMeter:
    """Reads what has happened since the last look. Owned by one engine's part of a round."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._read()

    def look(self) -> dict[str, float]:
        """Return the mean milliseconds of each stage since the last look, and the plans by kind."""
        now = self._read()
        since = now - self._before
        self._before = now
        found = {
            f"mean_{stage}_ms": 1e3 * since[f"{name}_sum"] / since[f"{name}_count"]
            for stage, name in _STAGES.items()
            if since[f"{name}_count"]
        }
        return found | {name: count for name, count in since.items() if name.startswith("plans_")}

    def _read(self) -> Counter[str]:
        text = httpx2.get(f"{self._url}/metrics", timeout=5.0, trust_env=False).text
        return counters(text)


def counters(text: str) -> Counter[str]:
    """Return the sums and counts of the stages, and the plans by kind, in Prometheus text. Pure."""
    wanted = {f"{name}_{kind}" for name in _STAGES.values() for kind in ("sum", "count")}
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in wanted:
                found[sample.name] += sample.value
            elif sample.name == _ROUTES:
                found[f"plans_{sample.labels['plan']}"] += sample.value
    return found

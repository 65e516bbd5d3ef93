"""How many slots of held KV blocks hold no token, sampled while a cluster works."""

import httpx2


class WasteMeter:
    """Adds up the slots of all workers at each look. Owned by one engine's part of a round."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._allocated = 0
        self._used = 0

    def look(self) -> None:
        """Ask the cluster once."""
        slots = httpx2.get(f"{self._url}/v1/cluster", timeout=5.0, trust_env=False).json()["totals"]["slots"]
        self._allocated += slots["allocated"]
        self._used += slots["used"]

    @property
    def share(self) -> float | None:
        """The share of slots that held no token, over all looks; None when none was held."""
        return 1 - self._used / self._allocated if self._allocated else None

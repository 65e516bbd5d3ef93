"""How a prompt was routed, for people."""

from dataclasses import dataclass

from common.ids import WorkerId
from common.messages import PlanKind
from gateway.router import Reason


@dataclass(frozen=True, slots=True)
class Route:
    """Who computes the prompt, who writes the answer, and why."""

    kind: PlanKind
    decode: WorkerId
    prefill: WorkerId | None
    cached_tokens: int
    reason: Reason

    def header(self) -> str:
        """Return the value of ``X-Baton-Route``."""
        return (
            f"{self.kind}; prefill={self.prefill or 'none'}; decode={self.decode}; cached={self.cached_tokens}; "
            f"reason={self.reason}"
        )

"""What one layer's attention computes besides plain causal softmax."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """A query at position p sees the keys at positions first_key(p) to p. Raises ValueError on widths below 1."""

    scaling: float
    """Factor on query-key products."""
    window: int | None = None
    """See at most this many keys, the query's own included."""
    chunk: int | None = None
    """See only keys at ``p // chunk * chunk`` and later."""
    softcap: float | None = None
    """Replace a score s by ``softcap * tanh(s / softcap)``."""

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("chunk", self.chunk), ("softcap", self.softcap)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}; it must be positive, or None for off")

    def first_key(self, position: int) -> int:
        """Return the first position that a query at ``position`` sees."""
        first = 0
        if self.window is not None:
            first = max(first, position - self.window + 1)
        if self.chunk is not None:
            first = max(first, position // self.chunk * self.chunk)
        return first

"""Quantiles and means of what a histogram has counted between two looks at it. Pure."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram at one moment, or what came to it between two."""

    bounds: tuple[float, ...] = ()
    """Upper bounds, ascending; the last one is infinite."""
    counts: tuple[float, ...] = ()
    """Observations up to each bound."""
    total: float = 0.0
    """Sum of all observations."""

    @property
    def num_observations(self) -> float:
        """How many there are."""
        return self.counts[-1] if self.counts else 0.0

    def since(self, earlier: "Buckets") -> "Buckets":
        """Return what has come since ``earlier``, a look at the same histogram; an empty one is the beginning."""
        if not earlier.counts:
            return self
        counts = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return Buckets(self.bounds, counts, self.total - earlier.total)

    def mean(self) -> float | None:
        """Return the mean; None of nothing."""
        return self.total / self.num_observations if self.num_observations else None

    def quantile(self, q: float) -> float | None:
        """Return the ``q`` quantile, taking a bucket's observations as evenly spread in it; None of nothing.

        What lies above the last finite bound counts as lying on it.
        """
        rank = q * self.num_observations
        if not rank:
            return None
        below = pairwise(((0.0, 0.0), *zip(self.bounds, self.counts, strict=True)))
        (low, seen), (high, count) = next(pair for pair in below if pair[1][1] >= rank)
        return low if high == float("inf") else low + (high - low) * (rank - seen) / (count - seen)

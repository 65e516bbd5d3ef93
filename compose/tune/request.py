"""One request on its way through a simulated cluster."""

from dataclasses import dataclass, field

from compose.tune.trace import Arrival
from kvstore.sequence import Sequence


@dataclass(slots=True, eq=False)
class SimRequest:
    """Owned by the simulated cluster."""

    number: int
    arrival: Arrival
    token_ids: list[int]
    """Prompt, and the answer so far."""
    token_times: list[float] = field(default_factory=list)
    """When each token of the answer reached the client."""
    sequence: Sequence | None = None
    """On its decode worker."""
    reading: Sequence | None = None
    """On its prefill worker."""
    num_moves: int = 0

    @property
    def num_left(self) -> int:
        """Tokens of the answer that are still to be written."""
        return self.arrival.answer_tokens - len(self.token_times)

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.token_times[0] - self.arrival.at_s

    @property
    def itl_s(self) -> float:
        """Mean seconds between two tokens; 0 for an answer of one."""
        gaps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / gaps if gaps else 0.0

    def gaps(self) -> list[float]:
        """Return the seconds between its tokens."""
        return [after - before for before, after in zip(self.token_times, self.token_times[1:], strict=False)]

    def write(self, now: float) -> None:
        """One more token has reached the client."""
        self.token_ids.append((1 << 31) + (self.number * 9973 + len(self.token_ids)) % (1 << 30))
        self.token_times.append(now)

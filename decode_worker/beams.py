"""The beams of one request: its search, and the sequences whose KV the beams have."""

from dataclasses import dataclass, field

from common.logprobs import TokenLogprobs
from common.sampling import SamplingParams
from decode_worker.beam_search import BeamSearch, Continuation, Hypothesis
from kvstore.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Branch:
    """One beam of the next step."""

    parent: Sequence
    token_id: int
    is_first: bool
    """It is the first with this parent, and so can take its sequence over; others fork from it."""


@dataclass(slots=True, eq=False)
class Beams:
    """Owned by the request. Begins with the prompt's sequence as its only beam."""

    search: BeamSearch
    sequences: list[Sequence]
    """Of the beams, in their order."""
    candidates: dict[Sequence, TokenLogprobs] = field(default_factory=dict)
    """The likeliest next tokens of the beams, as far as they are known."""

    @classmethod
    def new(cls, prompt: Sequence, params: SamplingParams) -> "Beams":
        """Return the beams of a request whose prompt is not computed."""
        return cls(BeamSearch(params), [prompt])

    @property
    def can_advance(self) -> bool:
        """Whether the KV of every beam has been computed, and its next tokens are known."""
        return all(sequence in self.candidates for sequence in self.sequences)

    def advance(self) -> list[Branch]:
        """Return the beams of the next step; none when the search is over."""
        chosen = self.search.advance([self.candidates[sequence] for sequence in self.sequences])
        self.candidates.clear()
        return [self._branch(chosen, n) for n in range(len(chosen))]

    def best(self, count: int) -> list[Hypothesis]:
        """See :class:`decode_worker.beam_search.BeamSearch`."""
        return self.search.best(count)

    def _branch(self, chosen: list[Continuation], n: int) -> Branch:
        parent = chosen[n].parent
        is_first = all(one.parent != parent for one in chosen[:n])
        return Branch(self.sequences[parent], chosen[n].token_id, is_first)

"""A sequence on its way through a scheduler, and what a scheduler decides for one step.

There is no phase in the data: a sequence has ``num_tokens`` tokens, and scheduling lets ``num_computed_tokens`` catch
up with them. When the last token is computed, its logits give the next one. A prompt chunk, a decode step and a
recomputation after a preemption are all the same thing.

Several samples of one prompt are several sequences, and one more for the prompt itself: it samples the first token of
each and then they fork from it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from common.grammar import Grammar
from common.ids import RequestId
from common.logprobs import TokenLogprobs
from common.model.grammar_state import GrammarState
from common.model.history import TokenHistory
from common.sampling import SamplingParams
from kvstore.block_table import BlockTable

SCORED_CHUNK_TOKENS = 128
"""A chunk of a prompt whose log probabilities are wanted has at most so many tokens: it takes a row of logits each."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and blocks of one sample, or of the prompt of several. Owned by one scheduler; compared by identity."""

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    table: BlockTable
    sample_indices: tuple[int, ...] = (0,)
    """Samples whose next token its last logits give."""
    num_forks: int = 0
    """Sequences that will fork from it; 0 for a sample."""
    num_computed_tokens: int = 0
    history: TokenHistory | None = None
    """What the sampler has seen of the tokens, where the parameters ask for it."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are known."""
    grammar: Grammar | None = None
    """What the output must follow."""
    grammar_state: GrammarState | None = None
    """Where in it the output is."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, by whichever worker."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Tokens whose KV is not computed yet; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens that one step may compute of it, beyond what a scheduler's budget says."""
        return SCORED_CHUNK_TOKENS if self.wants_prompt_logprobs else len(self.token_ids)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of the prompt are still to be computed, for which it all has to be."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens - 1

    def copy(self, table: BlockTable) -> "Sequence":
        """Return a sequence of the same tokens, of which nothing is computed, in an empty ``table``."""
        return Sequence(self.request_id, self.token_ids.copy(), self.num_prompt_tokens, self.sampling, table)

    def scored(self, start: int, logprobs: Iterable[TokenLogprobs]) -> None:
        """Keep the log probabilities of the prompt's tokens from ``start + 1`` on; those known already are dropped."""
        self.prompt_logprobs += list(logprobs)[len(self.prompt_logprobs) - start :]

    def adopt_prefix(self) -> None:
        """Begin with what the cache holds of the tokens, unless all of them must be computed. Its table is empty."""
        self.num_computed_tokens = 0 if self.wants_prompt_logprobs else self.table.adopt_prefix(self.token_ids)


@dataclass(frozen=True, slots=True)
class Chunk:
    """``num_scheduled_tokens`` tokens of ``sequence`` to compute in one step."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that its logits give the next one."""
        return self.num_scheduled_tokens == self.sequence.num_remaining_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the scheduled tokens belong to the prompt."""
        left = self.sequence.num_prompt_tokens - self.sequence.num_computed_tokens
        return max(0, min(self.num_scheduled_tokens, left))

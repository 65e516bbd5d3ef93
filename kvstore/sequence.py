"""A sequence on its way through a scheduler, and what a scheduler decides for one step.

There is no phase in the data: a sequence has ``num_tokens`` tokens, and scheduling lets ``num_computed_tokens`` catch
up with them. When the last token is computed, its logits give the next one. A prompt chunk, a decode step and a
recomputation after a preemption are all the same thing.
"""

from dataclasses import dataclass

from common.grammar import Grammar
from common.ids import RequestId
from common.model.grammar_state import GrammarState
from common.model.history import TokenHistory
from common.sampling import SamplingParams
from kvstore.block_table import BlockTable


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens and blocks of one request. Owned by one scheduler; compared by identity."""

    request_id: RequestId
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    table: BlockTable
    sample_index: int = 0
    num_computed_tokens: int = 0
    history: TokenHistory | None = None
    """What the sampler has seen of the tokens, where the parameters ask for it."""
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

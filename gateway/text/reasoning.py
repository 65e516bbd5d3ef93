"""Whether an answer begins with reasoning, as its prompt says, and what of it comes before a structure."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from common.constraint import Constraint, Preamble
from gateway.text.thinking import CLOSE, OPEN, ThinkReader
from gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning of an answer by a model that thinks."""

    begins_inside: bool
    """The prompt ends with the mark that opens it."""
    preamble: Preamble | None
    """None: it cannot be told from what is constrained, or the prompt closes it."""

    @classmethod
    def after(cls, token_ids: Sequence[int], tokenizer: Tokenizer) -> "Reasoning":
        """Return what the answer to a prompt may begin with. A mark that is several tokens cannot be waited for."""
        begins_inside = tokenizer.ends_with(token_ids, OPEN)
        start, end = tokenizer.added_token_id(OPEN), tokenizer.added_token_id(CLOSE)
        if end is None or (start is None and not begins_inside) or tokenizer.ends_with(token_ids, CLOSE):
            return cls(begins_inside, None)
        return cls(begins_inside, Preamble(end, None if begins_inside else start))

    def before(self, constraint: Constraint) -> Constraint:
        """Return ``constraint`` for what follows the reasoning."""
        return msgspec.structs.replace(constraint, preamble=self.preamble)

    def reader(self, constraint: Constraint | None) -> ThinkReader | None:
        """Return what sorts one answer; None when ``constraint`` rules from its first token on."""
        if constraint is not None and constraint.preamble is None:
            return None
        return ThinkReader(begins_inside=self.begins_inside)

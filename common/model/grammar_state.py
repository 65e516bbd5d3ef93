"""Where a sequence is in its grammar, and which tokens that allows next.

Made from the output tokens alone and brought up to date with each step, as a :class:`common.model.history.TokenHistory`
is. So it is the same on whatever worker, after a hand-over, a fork, a preemption or a move. Never loads torch.
"""

import enum
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from common.errors import BatonError, InternalError, InvalidRequest
from common.grammar import Grammar

Mask = NDArray[np.bool_]


class _At(enum.Enum):
    """Where the next token is."""

    START = enum.auto()  # of the answer, which a preamble may begin
    PREAMBLE = enum.auto()  # anything but an end may come
    GRAMMAR = enum.auto()


class GrammarState:
    """Follows one sequence. Owned by the sequence; used by the compute thread.

    ``eos_token_ids`` are the ends that the sequence may take. Once ``error`` is set, nothing else holds any more.
    """

    def __init__(self, grammar: Grammar, eos_token_ids: Sequence[int]) -> None:
        self.num_tokens = 0
        """Output tokens seen so far."""
        self.error: BatonError | None = None
        self._matcher = grammar.matcher()
        self._preamble = grammar.preamble
        self._ends = [*{*grammar.eos_token_ids, *eos_token_ids}]
        self._withheld = [token_id for token_id in grammar.eos_token_ids if token_id not in eos_token_ids]
        self._at = _At.GRAMMAR
        if self._preamble is not None:
            self._at = _At.PREAMBLE if self._preamble.start is None else _At.START

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the output tokens that follow those seen so far."""
        self.num_tokens += len(token_ids)
        ruled = self._behind_preamble(list(token_ids))
        if self.error is None and not self._matcher.consume_tokens(ruled):
            self.error = InternalError("the answer does not follow its structure")

    def allowed(self, vocab_size: int) -> Mask:
        """Return ``[vocab_size]``: which tokens may come next; all of them after an error, or behind the end.

        A withheld end is among them only where nothing else is.
        """
        bits = np.ones(vocab_size, dtype=np.bool_)
        if self._at is _At.PREAMBLE:
            bits[self._ends] = False
        elif self.error is None and not self._matcher.is_stopped():  # else the token is never used
            words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            bits = np.unpackbits(words, count=vocab_size, bitorder="little").view(np.bool_)
            self._withhold(bits)
            self._check(not self._matcher.is_error() and bool(bits.any()))
        if self._at is _At.START and self._preamble is not None:
            bits[self._preamble.start] = True
        return bits

    def is_complete_with(self, token_id: int) -> bool:
        """Whether nothing can follow ``token_id``, one of the allowed tokens."""
        if self.error is not None or self._is_free(token_id):
            return False
        self._check(self._matcher.consume_token(token_id))
        is_complete = self._matcher.is_stopped()
        self._check(self._matcher.rollback(1))
        return is_complete

    def _is_free(self, token_id: int) -> bool:
        """Whether ``token_id``, as the next one, belongs to the preamble."""
        begins = self._at is _At.START and self._preamble is not None and token_id == self._preamble.start
        return begins or self._at is _At.PREAMBLE

    def _behind_preamble(self, token_ids: list[int]) -> list[int]:
        """Return those of the next tokens that the grammar rules."""
        for position, token_id in enumerate(token_ids):
            if not self._is_free(token_id):
                self._at = _At.GRAMMAR
                return token_ids[position:]
            is_end = self._at is _At.PREAMBLE and self._preamble is not None and token_id == self._preamble.end
            self._at = _At.GRAMMAR if is_end else _At.PREAMBLE
        return []

    def _withhold(self, bits: Mask) -> None:
        ends = [token_id for token_id in self._withheld if bits[token_id]]
        bits[ends] = False
        if ends and not bits.any():
            bits[ends] = True

    def _check(self, holds: bool) -> None:
        if not holds and self.error is None:
            self.error = InvalidRequest("the structure that was asked for is too complex, or cannot be continued")

"""What the replies of both endpoints have in common."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, UnsetType

from common.logprobs import TokenLogprobs
from common.sampling import FinishReason
from gateway.api.fields import CommonFields
from gateway.api.logprobs import PromptLogprobs, prompt_logprobs
from gateway.api.usage import Usage
from gateway.request.generation import IndexedPiece
from gateway.text.token_texts import TokenTexts


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What is the same in every chunk of a reply."""

    id: str
    created: int
    """Unix time in seconds."""
    model: str
    return_token_ids: bool
    prompts: Sequence[tuple[int, ...]]
    """The prompt of each choice."""
    texts: TokenTexts
    num_logprobs: int | None
    """Most likely tokens that are named beside each token of an answer; None: nothing is said of how likely it is."""
    num_prompt_logprobs: int | None
    """The same for the tokens of a prompt, as a list of its own."""

    @classmethod
    def new(
        cls, prefix: str, model: str, texts: TokenTexts, fields: CommonFields, prompts: Sequence[tuple[int, ...]]
    ) -> "ReplyHead":
        """Return the head of a reply to ``fields`` that begins now; its id starts with ``prefix``."""
        created = time.time_ns() // 1_000_000_000
        return cls(
            f"{prefix}-{secrets.token_hex(16)}",
            created,
            model,
            bool(fields.return_token_ids),
            [prompt for prompt in prompts for _ in range(fields.num_choices)],
            texts,
            fields.num_logprobs,
            fields.prompt_logprobs,
        )

    def prompt_logprobs(self, index: int, answer: "WholeAnswer") -> PromptLogprobs | UnsetType:
        """Return what is said of the prompt of a choice, if that was asked for."""
        if self.num_prompt_logprobs is None or answer.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(self.prompts[index], answer.prompt_logprobs, self.texts, self.num_prompt_logprobs)


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """One answer, gathered from its pieces."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def mean_logprob(self) -> float:
        """Mean of the tokens' log probabilities."""
        return sum(known.logprob for known in self.logprobs) / max(1, len(self.logprobs))


def gather(items: Sequence[IndexedPiece]) -> WholeAnswer:
    """Return the answer that the pieces make up."""
    pieces = [item.piece for item in items]
    last = pieces[-1]
    return WholeAnswer(
        "".join([piece.text for piece in pieces]),
        tuple(token_id for piece in pieces for token_id in piece.token_ids),
        last.finish,
        last.stop_reason,
        tuple(known for piece in pieces for known in piece.logprobs),
        items[-1].prompt_logprobs,
    )


def best(answers: Sequence[WholeAnswer], num_samples: int, num_choices: int) -> list[WholeAnswer]:
    """Return the ``num_choices`` likeliest of each prompt's ``num_samples`` answers, the likeliest first.

    Where all are wanted, their order is kept.
    """
    if num_choices == num_samples:
        return list(answers)
    samples = [answers[first : first + num_samples] for first in range(0, len(answers), num_samples)]
    ranked = [sorted(some, key=lambda answer: answer.mean_logprob, reverse=True) for some in samples]
    return [answer for some in ranked for answer in some[:num_choices]]


class ReplyWriter(Protocol):
    """Writes one reply, as a stream of JSON chunks or whole."""

    def chunks(self, piece: IndexedPiece, usage: Usage | None) -> list[bytes]:
        """Return the chunks for a piece, each with ``usage`` if it is given."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk that has no choices, only usage."""

    def whole(self, answers: Sequence[WholeAnswer], usage: Usage) -> bytes:
        """Return the reply that is not streamed."""

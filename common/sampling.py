"""Sampling parameters, the position-keyed random number, and the rule that ends a sequence.

A sampled token is a pure function of (logits, parameters, seed, sample index, position). So a sequence goes on
with the same tokens after a hand-over, a preemption, a fork or a migration. Knows nothing of tensors.
"""

import enum
import hashlib
import struct
from typing import Literal

import msgspec

from common.constraint import Constraint


class FinishReason(enum.StrEnum):
    """Why a sequence ended, as clients see it."""

    STOP = "stop"  # end-of-sequence token, stop token, or stop string
    LENGTH = "length"  # max_tokens or the context limit


class BeamParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How an answer is looked for by beam search; the names are transformers'."""

    width: int
    """Beams, >= 1."""
    length_penalty: float = 1.0
    """Above 0 favours long answers, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """True: end with ``width`` complete answers; False: when a better one is unlikely; never: when there is none."""

    def num_candidates(self, num_ends: int) -> int:
        """Return how many continuations one step looks at, when so many tokens end an answer."""
        return self.width * max(2, 1 + num_ends)


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How one sequence is sampled, and how urgently; validated by the gateway, so workers trust it."""

    max_tokens: int
    """Tokens to generate at most, >= 1."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 is off."""
    top_k: int = 0
    """Keep this many most likely tokens; 0 is off."""
    min_p: float = 0.0
    """Keep tokens that are at least this times as likely as the most likely one; 0 is off."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is closest to the expected one, until their probability reaches this; 1 is off."""
    seed: int = 0
    """Unsigned 64-bit key of the random numbers; the gateway draws one when the client sent none."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once for each time that it is in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, what is added to its logit)."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be sampled; empty: any."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the output must not contain."""
    min_tokens: int = 0
    """Tokens that end the sequence are not sampled before the output has so many."""
    eos_token_ids: tuple[int, ...] = ()
    """End-of-sequence tokens of the model; empty with ``ignore_eos``."""
    stop_token_ids: tuple[int, ...] = ()
    """Further tokens that end the sequence."""
    beam: BeamParams | None = None
    """Search instead of sampling; then ``logprobs`` is the number of its candidates."""
    constraint: Constraint | None = None
    """The language that the output is in; the sequence ends with the token that completes it."""
    priority: int = 0
    """Lower ones go first where there is no room for all."""
    logprobs: int | None = None
    """Say how likely each token was, beside so many of the most likely ones; None: do not."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""

    @property
    def reads_history(self) -> bool:
        """Whether the next token depends on which tokens came before, beyond the logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty or self.bad_words)


def noise_key(seed: int, sample_index: int, position: int) -> int:
    """Return the 64 bits that, with a token's id, make the random number of that token at ``position``.

    ``position`` counts all tokens before the sampled one, prompt included; ``sample_index`` numbers the parallel
    samples of one prompt. A keyed hash, so it needs no state and no order of calls.
    """
    key = struct.pack("<QIQ", seed, sample_index, position)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8, person=b"baton-sample").digest(), "little")


def finish_reason(
    token_id: int, num_output_tokens: int, params: SamplingParams, *, is_complete: bool = False
) -> FinishReason | None:
    """Say whether the sequence ends with ``token_id``, its ``num_output_tokens``-th output token.

    ``is_complete`` when the sequence's constraint allows nothing after it.
    """
    if is_complete or token_id in params.eos_token_ids or token_id in params.stop_token_ids:
        return FinishReason.STOP
    if num_output_tokens >= params.max_tokens:
        return FinishReason.LENGTH
    return None

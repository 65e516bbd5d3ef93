"""The body of ``POST /v1/completions``: its fields, and the prompts in it."""

import msgspec

from common.errors import InvalidRequest
from gateway.api import refused
from gateway.api.fields import MAX_LOGPROBS, CommonFields, check_common, check_range, decode
from gateway.bounds import Bounds, check_length

Prompt = str | list[int]
"""A text, or its tokens."""


class CompletionFields(CommonFields, frozen=True, kw_only=True):
    """What is served of a completion request."""

    prompt: str | list[str | int | list[int]]
    best_of: int | None = None
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def num_samples(self) -> int:
        """See :class:`gateway.api.fields.CommonFields`."""
        return self.num_choices if self.use_beam_search else self.best_of or self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """As there."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As there; an echoed prompt has log probabilities where the answer has."""
        asked = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in asked if count is not None), default=None)

    @property
    def min_token_limit(self) -> int:
        """As there; who wants the prompt back may want nothing else."""
        return 0 if self.echo else 1


_DECODER = msgspec.json.Decoder(CompletionFields)
_REFUSED = refused.RefusedFields(refused.COMPLETIONS)


def parse(body: bytes, bounds: Bounds) -> CompletionFields:
    """Return the fields of a completion request; raises InvalidRequest."""
    fields = decode(body, _DECODER)
    _REFUSED.check(body)
    check_common(fields, bounds)
    check_range("logprobs", fields.logprobs, 0, MAX_LOGPROBS)
    check_range("best_of", fields.best_of, fields.num_choices, bounds.max_n)
    if fields.stream and fields.num_samples > fields.num_choices:
        raise InvalidRequest("best_of above n cannot be streamed: the best are known at the end", param="best_of")
    return fields


def prompts(fields: CompletionFields, vocab_size: int, bounds: Bounds) -> list[Prompt]:
    """Return the prompts one by one; raises InvalidRequest when they are mixed, empty, too many, or no tokens."""
    found = _split(fields.prompt)
    check_length("prompt", found, bounds.max_prompts)
    for prompt in found:
        if not isinstance(prompt, str):
            check_tokens(prompt, vocab_size)
    return found


def _split(prompt: str | list[str | int | list[int]]) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise _wrong("must not be empty")
    tokens = [item for item in prompt if isinstance(item, int)]
    if len(tokens) == len(prompt):
        return [tokens]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(texts) == len(prompt):
        return [*texts]
    if len(lists) == len(prompt):
        return [*lists]
    raise _wrong("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


def check_tokens(token_ids: list[int], vocab_size: int, param: str = "prompt") -> None:
    """Raise InvalidRequest unless these are tokens of the vocabulary, at least one."""
    if not token_ids:
        raise _wrong("must not be an empty list of token ids", param)
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise _wrong(f"has a token id that is not between 0 and {vocab_size - 1}", param)


def _wrong(what: str, param: str = "prompt") -> InvalidRequest:
    return InvalidRequest(f"{param} {what}", param=param)

"""The fields that both endpoints share, their types and bounds, and what they become.

JSON is decoded straight into typed structs: a wrong type is an error that names the field. Null means left out. Bounds
follow vLLM's; each error says the limit.
"""

import math
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from common.constraint import Constraint
from common.errors import InvalidRequest
from common.sampling import SamplingParams
from gateway.api.beams import BeamFields, beam_params, check_beams
from gateway.bounds import Bounds, check_length
from gateway.errors import ContextLengthExceeded
from gateway.http.salt import check_salt

MAX_ECHO = 200
"""Characters of a message about a malformed body at most."""

MAX_BIAS = 100
MAX_BAD_WORD_LENGTH = 1024
MAX_LOGPROBS = 20
MAX_PRIORITY = 100
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

LONE_SURROGATE = "half a surrogate pair (\\\\ud800 to \\\\udfff) is no character"

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_LONE_SURROGATE = re.compile(_HIGH + rb"(?!" + _LOW + rb")|(?<!" + _HIGH.replace(b"{2}", b"[0-9a-fA-F]") + rb")" + _LOW)
_PATH = re.compile(r" - at `\$\.(\w+)")
_MISSING = re.compile(r"missing required field `(\w+)`$")


class StreamOptions(msgspec.Struct, frozen=True):
    """What a streamed answer carries besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(BeamFields, frozen=True, kw_only=True):
    """What chat completions and completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    n: int | None = None
    prompt_logprobs: int | None = None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt that the client gets."""
        return 1 if self.n is None else self.n

    @property
    def num_samples(self) -> int:
        """Answers to each prompt that are written."""
        return self.num_choices

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to name beside each token of an answer; None: say nothing of how likely it is."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return self.prompt_logprobs

    @property
    def min_token_limit(self) -> int:
        """The least that :meth:`token_limit` may be."""
        return 1

    def token_limit(self) -> int | None:
        """Return how many tokens the client allows, if it says so; the newer name goes over the older one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def stop_strings(self) -> tuple[str, ...]:
        """Return the stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


Fields = TypeVar("Fields", bound=msgspec.Struct)


def decode(body: bytes, decoder: msgspec.json.Decoder[Fields]) -> Fields:
    """Return the fields in ``body``; raises InvalidRequest for what is not JSON, too deep, or of a wrong type."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from error
    except msgspec.DecodeError as error:
        why = LONE_SURROGATE if _LONE_SURROGATE.search(body) else str(error)[:MAX_ECHO]
        raise InvalidRequest(f"the body is not valid JSON: {why}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def _type_error(message: str) -> InvalidRequest:
    match = _PATH.search(message) or _MISSING.search(message)
    return InvalidRequest(message[:MAX_ECHO], param=match[1] if match else None)


def check_common(fields: CommonFields, bounds: Bounds) -> None:
    """Raise InvalidRequest when a shared field is out of its bounds."""
    check_range("max_tokens", fields.max_tokens, fields.min_token_limit, math.inf)
    check_range("max_completion_tokens", fields.max_completion_tokens, fields.min_token_limit, math.inf)
    check_range("temperature", fields.temperature, 0, 2)
    _check_share("top_p", fields.top_p)
    check_range("top_k", fields.top_k, -1, math.inf)
    check_range("min_p", fields.min_p, 0, 1)
    _check_share("typical_p", fields.typical_p)
    check_range("presence_penalty", fields.presence_penalty, -2, 2)
    check_range("frequency_penalty", fields.frequency_penalty, -2, 2)
    if fields.repetition_penalty is not None and not 0 < fields.repetition_penalty < math.inf:
        raise InvalidRequest("repetition_penalty must be above 0 and finite", param="repetition_penalty")
    _check_lists(fields, bounds.max_list_entries)
    _check_min_tokens(fields.min_tokens, fields.token_limit())
    check_range("seed", fields.seed, MIN_SEED, MAX_SEED)
    check_range("priority", fields.priority, -MAX_PRIORITY, MAX_PRIORITY)
    _check_stop(fields.stop_strings(), bounds)
    check_salt(fields.cache_salt)
    check_range("n", fields.n, 1, bounds.max_n)
    check_range("prompt_logprobs", fields.prompt_logprobs, 0, MAX_LOGPROBS)
    check_beams(fields, fields.num_choices, bounds)
    if fields.prompt_logprobs is not None and fields.stream:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")


def check_range(name: str, value: float | None, low: float, high: float) -> None:
    """Raise InvalidRequest unless ``value`` was left out or lies within its bounds."""
    if value is not None and not low <= value <= high:
        limit = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {limit}", param=name)


def _check_share(name: str, value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise InvalidRequest(f"{name} must be above 0 and at most 1", param=name)


def _check_lists(fields: CommonFields, limit: int) -> None:
    for name in ("logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids"):
        check_length(name, getattr(fields, name), limit)
    if fields.allowed_token_ids is not None and not fields.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
    for bias in (fields.logit_bias or {}).values():
        check_range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
    for word in fields.bad_words or ():
        if not 0 < len(word) <= MAX_BAD_WORD_LENGTH:
            raise InvalidRequest(f"bad_words must have 1 to {MAX_BAD_WORD_LENGTH} characters each", param="bad_words")


def _check_min_tokens(value: int | None, limit: int | None) -> None:
    if value is None:
        return
    if value < 0:
        raise InvalidRequest("min_tokens must be at least 0", param="min_tokens")
    if limit is not None and value > limit:
        raise InvalidRequest(f"min_tokens is {value}, but at most {limit} tokens may be written", param="min_tokens")


def _check_stop(stop: tuple[str, ...], bounds: Bounds) -> None:
    check_length("stop", stop, bounds.max_stop_strings)
    if not all(stop):
        raise InvalidRequest("stop must not contain an empty string", param="stop")
    if any(len(text) > bounds.max_stop_length for text in stop):
        raise InvalidRequest(f"stop has a string of more than {bounds.max_stop_length} characters", param="stop")


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """What parameters ask of the model's tokenizer."""

    eos_token_ids: tuple[int, ...]
    vocab_size: int
    bad_words: tuple[tuple[int, ...], ...]
    """The request's bad words as tokens."""


def sampling_params(
    fields: CommonFields,
    num_prompt_tokens: int,
    max_model_len: int,
    tokens: ModelTokens,
    constraint: Constraint | None = None,
) -> SamplingParams:
    """Return how an answer to a prompt of ``num_prompt_tokens`` is sampled.

    Raises InvalidRequest when the prompt has no token, a token id is none of the model's, or ``constraint`` comes with
    other limits to the tokens; and ContextLengthExceeded when prompt and answer do not fit ``max_model_len``.
    """
    if constraint is not None and fields.allowed_token_ids:
        raise InvalidRequest("allowed_token_ids cannot be combined with structured output", param="allowed_token_ids")
    if num_prompt_tokens < 1:
        raise InvalidRequest("the prompt has no tokens", param=prompt_field(fields))
    room = max_model_len - num_prompt_tokens
    wanted = fields.token_limit()
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens; prompt and answer together have at most {max_model_len}",
            param=prompt_field(fields),
        )
    if wanted is not None and wanted > room:
        raise ContextLengthExceeded(
            f"the prompt has {num_prompt_tokens} tokens and the answer may have {wanted}; together they have at most "
            f"{max_model_len}",
            param="max_tokens" if fields.max_tokens == wanted else "max_completion_tokens",
        )
    max_tokens = room if wanted is None else max(1, wanted)
    ranks_samples = fields.num_samples > fields.num_choices
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=_given(fields.temperature, 1.0),
        top_p=_given(fields.top_p, 1.0),
        top_k=max(0, _given(fields.top_k, 0)),
        seed=secrets.randbits(64) if fields.seed is None else fields.seed % 2**64,
        min_p=_given(fields.min_p, 0.0),
        typical_p=_given(fields.typical_p, 1.0),
        repetition_penalty=_given(fields.repetition_penalty, 1.0),
        presence_penalty=_given(fields.presence_penalty, 0.0),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        logit_bias=_biases(fields.logit_bias or {}, tokens.vocab_size),
        allowed_token_ids=_token_ids("allowed_token_ids", fields.allowed_token_ids or (), tokens.vocab_size),
        bad_words=tokens.bad_words,
        min_tokens=_min_tokens(fields, max_tokens),
        eos_token_ids=() if fields.ignore_eos else tokens.eos_token_ids,
        stop_token_ids=_token_ids("stop_token_ids", fields.stop_token_ids or (), tokens.vocab_size),
        constraint=constraint,
        priority=_given(fields.priority, 0),
        logprobs=0 if fields.num_logprobs is None and ranks_samples else fields.num_logprobs,
        prompt_logprobs=fields.num_prompt_logprobs,
    )
    return _searching(params, fields)


def _searching(params: SamplingParams, fields: CommonFields) -> SamplingParams:
    """Return ``params`` as a beam search needs them, if one is asked for."""
    beam = beam_params(fields, fields.num_choices)
    if beam is None:
        return params
    if params.constraint is not None:
        raise InvalidRequest("structured output cannot be combined with use_beam_search", param="use_beam_search")
    num_candidates = beam.num_candidates(len({*params.eos_token_ids, *params.stop_token_ids}))
    return msgspec.structs.replace(params, beam=beam, temperature=0.0, logprobs=num_candidates)


def _min_tokens(fields: CommonFields, limit: int) -> int:
    wanted = fields.min_tokens or 0
    _check_min_tokens(wanted, limit)
    return wanted


def _biases(biases: dict[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not all(len(key) < 16 and key.isascii() and key.isdecimal() for key in biases):
        raise InvalidRequest("logit_bias must have token ids as its keys", param="logit_bias")
    token_ids = [int(key) for key in biases]
    if len(set(token_ids)) < len(token_ids):
        raise InvalidRequest("logit_bias names a token twice", param="logit_bias")
    _token_ids("logit_bias", token_ids, vocab_size)
    return tuple(zip(token_ids, map(float, biases.values()), strict=True))


def _token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Return ``token_ids`` without repetitions; raises InvalidRequest when one is not below ``vocab_size``."""
    if token_ids and not (0 <= min(token_ids) and max(token_ids) < vocab_size):
        raise InvalidRequest(f"{name} has a token id that is not between 0 and {vocab_size - 1}", param=name)
    return tuple(dict.fromkeys(token_ids))


def prompt_field(fields: CommonFields) -> str:
    """Return the name of the field that holds the prompt."""
    return "messages" if hasattr(fields, "messages") else "prompt"


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value

"""The fields that both endpoints share, their types and bounds, and what they become.

JSON is decoded straight into typed structs: a wrong type is an error that names the field. Null means left out. Bounds
follow vLLM's; each error says the limit.
"""

import math
import re
import secrets
from typing import Any, TypeVar

import msgspec

from common.errors import InvalidRequest
from common.sampling import SamplingParams
from gateway.api.salt import check_salt
from gateway.errors import ContextLengthExceeded

MAX_ECHO = 200
"""Characters of a message about a malformed body at most."""

MAX_STOP_STRINGS = 4
MAX_STOP_LENGTH = 4096
MIN_SEED, MAX_SEED = -(2**63), 2**63 - 1

_PATH = re.compile(r" - at `\$\.(\w+)")
_MISSING = re.compile(r"missing required field `(\w+)`$")


class StreamOptions(msgspec.Struct, frozen=True):
    """What a streamed answer carries besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """What chat completions and completions have in common."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None

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
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:MAX_ECHO]}") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error


def _type_error(message: str) -> InvalidRequest:
    match = _PATH.search(message) or _MISSING.search(message)
    return InvalidRequest(message[:MAX_ECHO], param=match[1] if match else None)


def check_common(fields: CommonFields) -> None:
    """Raise InvalidRequest when a shared field is out of its bounds."""
    _check_token_limit("max_tokens", fields.max_tokens)
    _check_token_limit("max_completion_tokens", fields.max_completion_tokens)
    _check_range("temperature", fields.temperature, 0, 2)
    _check_top_p(fields.top_p)
    _check_range("top_k", fields.top_k, -1, math.inf)
    _check_range("seed", fields.seed, MIN_SEED, MAX_SEED)
    _check_stop(fields.stop_strings())
    check_salt(fields.cache_salt)
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        limit = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise InvalidRequest(f"{name} must be {limit}", param=name)


def _check_top_p(top_p: float | None) -> None:
    if top_p is not None and not 0 < top_p <= 1:
        raise InvalidRequest("top_p must be above 0 and at most 1", param="top_p")


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"stop has more than {MAX_STOP_STRINGS} strings", param="stop")
    if not all(stop):
        raise InvalidRequest("stop must not contain an empty string", param="stop")
    if any(len(text) > MAX_STOP_LENGTH for text in stop):
        raise InvalidRequest(f"stop has a string of more than {MAX_STOP_LENGTH} characters", param="stop")


def _check_token_limit(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} must be at least 1", param=name)


def sampling_params(
    fields: CommonFields, num_prompt_tokens: int, max_model_len: int, eos_token_ids: tuple[int, ...]
) -> SamplingParams:
    """Return how an answer to a prompt of ``num_prompt_tokens`` is sampled.

    Raises InvalidRequest when the prompt has no token, and ContextLengthExceeded when prompt and answer do not fit
    ``max_model_len``.
    """
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
    return SamplingParams(
        max_tokens=wanted or room,
        temperature=_given(fields.temperature, 1.0),
        top_p=_given(fields.top_p, 1.0),
        top_k=max(0, _given(fields.top_k, 0)),
        seed=secrets.randbits(64) if fields.seed is None else fields.seed % 2**64,
        eos_token_ids=() if fields.ignore_eos else eos_token_ids,
    )


def prompt_field(fields: CommonFields) -> str:
    """Return the name of the field that holds the prompt."""
    return "messages" if hasattr(fields, "messages") else "prompt"


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value

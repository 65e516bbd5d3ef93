"""How much one request may hold. Options of the gateway; the defaults are vLLM's where it has such a bound."""

import dataclasses
from collections.abc import Sized
from dataclasses import dataclass

from common.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Every bound is at least 1."""

    max_body_bytes: int = 32 * 1024 * 1024
    """Size of a request's body at most."""

    max_n: int = 128
    """Answers to one prompt (n, best_of) at most."""

    max_prompts: int = 1024
    """Prompts of one completion request at most."""

    max_messages: int = 10_000
    """Messages of one conversation at most."""

    max_stop_strings: int = 4
    """Stop strings of one request at most."""

    max_stop_length: int = 4096
    """Characters of a stop string at most."""

    max_list_entries: int = 1024
    """Entries of logit_bias, allowed_token_ids, bad_words and stop_token_ids at most."""

    max_tools: int = 128
    """Tools of one request at most."""

    max_schema_depth: int = 64
    """How deep a JSON schema or another JSON value of a request may be nested."""

    def check(self) -> None:
        """Raise ConfigError for a bound that lets nothing in."""
        for bound in dataclasses.fields(Bounds):
            if getattr(self, bound.name) < 1:
                raise ConfigError(
                    f"--{bound.name.replace('_', '-')} must be at least 1, not {getattr(self, bound.name)}"
                )


def check_length(name: str, value: Sized | None, limit: int) -> None:
    """Raise InvalidRequest when the field ``name`` has more than ``limit`` entries."""
    if value is not None and len(value) > limit:
        raise InvalidRequest(f"{name} has more than {limit} entries", param=name)

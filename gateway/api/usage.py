"""The ``usage`` object of both endpoints."""

import msgspec

from gateway.request.generation import UsageCounts


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: each prompt counted once, answers summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage_of(counts: UsageCounts) -> Usage:
    """Return ``counts`` as clients get them."""
    return Usage(
        counts.prompt_tokens,
        counts.completion_tokens,
        counts.prompt_tokens + counts.completion_tokens,
        PromptTokensDetails(counts.cached_tokens),
    )

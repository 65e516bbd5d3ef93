"""Beam search as clients ask for it: its fields, and what cannot be combined with them.

What changes probabilities or ends answers otherwise is refused rather than ignored: the answers are those of
transformers' beam search, which are found by log probabilities alone.
"""

from typing import Any, Literal

from common.errors import InvalidRequest
from common.sampling import BeamParams
from gateway.api.structured import StructuredFields
from gateway.bounds import Bounds

MAX_LENGTH_PENALTY = 10.0

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "min_tokens": (0,),
    "stop": ([],),
    "logprobs": (False,),
}
"""Fields that cannot be combined with a beam search, with the values, besides null, that ask for nothing."""


class BeamFields(StructuredFields, frozen=True, kw_only=True):
    """The fields of a beam search."""

    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None


def check_beams(fields: BeamFields, num_choices: int, bounds: Bounds) -> None:
    """Raise InvalidRequest when the fields of a beam search are wrong, or cannot be combined with others."""
    penalty = fields.length_penalty
    if penalty is not None and not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
        limit = f"between {-MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
        raise InvalidRequest(f"length_penalty must be {limit}", param="length_penalty")
    if not fields.use_beam_search:
        _check_unused(fields)
        return
    width = beam_width(fields, num_choices)
    if not num_choices <= width <= bounds.max_n:
        raise InvalidRequest(f"beam_width must be between n and {bounds.max_n}", param="beam_width")
    for name, neutral in _NEUTRAL.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise InvalidRequest(f"{name} cannot be combined with use_beam_search", param=name)


def _check_unused(fields: BeamFields) -> None:
    unused = {"beam_width": (None,), "length_penalty": (None, 1), "early_stopping": (None, False)}
    for name, neutral in unused.items():
        if getattr(fields, name) not in neutral:
            raise InvalidRequest(f"{name} needs use_beam_search to be true", param=name)


def beam_width(fields: BeamFields, num_choices: int) -> int:
    """Return how many beams are asked for: as many as answers, if nothing is said."""
    if fields.beam_width is not None:
        return fields.beam_width
    return getattr(fields, "best_of", None) or num_choices


def beam_params(fields: BeamFields, num_choices: int) -> BeamParams | None:
    """Return the search that is asked for, if one is."""
    if not fields.use_beam_search:
        return None
    penalty = 1.0 if fields.length_penalty is None else fields.length_penalty
    return BeamParams(beam_width(fields, num_choices), penalty, fields.early_stopping or False)

"""How many tokens a sequence may have.

Two kinds of rotary positions change all frequencies once the longest sequence of a forward pass is past a length:
dynamic NTK past ``max_position_embeddings``, LongRoPE past ``original_max_position_embeddings``. In a packed step
one sequence's tokens would then depend on another's length, and blocks in a cache on who computed them. So such a
model is held below that length.
"""

import logging
from collections.abc import Iterator
from typing import Any

from transformers import PretrainedConfig

from common.errors import ConfigError, UnsupportedModel

log = logging.getLogger(__name__)


def context_limit(config: PretrainedConfig, wanted: int | None) -> int:
    """Return the limit for the text model of ``config``, at most ``wanted`` tokens.

    Raises ConfigError when ``wanted`` is over what the positions of the model reach, and UnsupportedModel when the
    model names no limit and ``wanted`` is None.
    """
    declared: int | None = getattr(config, "max_position_embeddings", None)
    if declared is not None and wanted is not None and wanted > declared:
        raise ConfigError(f"--max-model-len is {wanted}, but the model's positions end at {declared}")
    limit = wanted or declared
    if limit is None:
        raise UnsupportedModel("the model's configuration names no context limit; give one with --max-model-len")
    for rope in _ropes(getattr(config, "rope_parameters", None)):
        stable = _stable_length(rope, declared)
        if stable is not None and stable < limit:
            log.warning(
                "%s rotary positions: limit is %d tokens instead of %d, beyond it a sequence's tokens would depend "
                "on the others in its step",
                rope["rope_type"],
                stable,
                limit,
            )
            limit = stable
    return limit


def _ropes(parameters: Any) -> Iterator[dict[str, Any]]:
    """Yield every rotary setting: the one of all layers, or one a layer type."""
    if isinstance(parameters, dict):
        if "rope_type" in parameters:
            yield parameters
        for value in parameters.values():
            yield from _ropes(value)


def _stable_length(rope: dict[str, Any], declared: int | None) -> int | None:
    """Return the length up to which the frequencies of ``rope`` do not move, or None when they never do."""
    if "dynamic" in rope["rope_type"]:
        return declared
    if rope["rope_type"] == "longrope":
        return rope.get("original_max_position_embeddings", declared)
    return None

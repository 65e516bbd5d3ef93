"""Sizes in bytes as people write them: ``2GiB``, ``512 MB``, ``4096``."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter, Token

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_bytes(text: str) -> int:
    """Return the number of bytes that ``text`` names; ``KiB`` counts in 1024, ``KB`` and a bare ``K`` in 1000.

    Raises ValueError when it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is not a size; write it like 2GiB, 512MB or 4096")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2].lower()])


def format_bytes(num_bytes: int) -> str:
    """Return ``num_bytes`` with one decimal in the largest binary unit that fits, such as ``1.5GiB``."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f}{unit}" if unit == "B" else f"{value:.1f}{unit}"


def _convert(_kind: Any, tokens: Sequence[Token]) -> int:
    return parse_bytes(tokens[0].value)


ByteSize = Annotated[int, Parameter(converter=_convert)]
"""An option in bytes: an int in code, a size with a unit on the command line."""

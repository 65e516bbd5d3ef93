"""Sizes in bytes as people write them: ``2GiB``, ``512 MB``, ``4096``."""

import re

from common.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str, *, flag: str) -> int:
    """Return the number of bytes that ``text`` names; ``KiB`` counts in 1024, ``KB`` and a bare ``K`` in 1000.

    Raises ConfigError, naming ``flag``, when it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ConfigError(f"{flag} is {text!r}, which is not a size; write it like 2GiB, 512MB or 4096")
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS[match[2].lower()])


def format_size(num_bytes: int) -> str:
    """Return ``num_bytes`` with one decimal in the largest binary unit that fits, such as ``1.5GiB``."""
    value, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f}{unit}" if unit == "B" else f"{value:.1f}{unit}"

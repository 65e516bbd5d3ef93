"""The file of ``--pin-prefix``: prompts whose prefixes are worth keeping, one JSON object a line.

    {"name": "support", "system": "You are ..."}     the system message of chats
    {"name": "few-shot", "prompt": "Q: ..."}         the beginning of a raw prompt

``cache_salt`` names the salt that the requests will send, if they send one.
"""

from pathlib import Path

import msgspec

from common.errors import ConfigError, InvalidRequest
from gateway.http.salt import check_salt

MAX_PINNED = 1000


class PinnedPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One prefix to warm and keep."""

    name: str
    system: str | None = None
    prompt: str | None = None
    cache_salt: str | None = None


def read_pinned(path: Path | None) -> tuple[PinnedPrefix, ...]:
    """Return what the file asks for, nothing without a file; raises ConfigError, which names the line."""
    if path is None:
        return ()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--pin-prefix {path} cannot be read: {error.strerror}") from error
    found = [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if len(found) > MAX_PINNED:
        raise ConfigError(f"--pin-prefix {path} has {len(found)} prefixes; at most {MAX_PINNED} can be kept")
    return tuple(found)


def _parse(path: Path, number: int, line: bytes) -> PinnedPrefix:
    try:
        pinned = msgspec.json.decode(line, type=PinnedPrefix)
        check_salt(pinned.cache_salt)
    except (msgspec.MsgspecError, UnicodeDecodeError, InvalidRequest) as error:
        raise ConfigError(f"--pin-prefix {path}, line {number}: {error}") from error
    if bool(pinned.system) == bool(pinned.prompt):
        raise ConfigError(f"--pin-prefix {path}, line {number}: exactly one of system and prompt must be given")
    return pinned

"""Whose cached blocks a request may share: its cache salt.

The API key's salt is always part of it, so that a client's ``cache_salt`` divides what its key may share and never
reaches what another key has.
"""

import hashlib

from starlette.requests import Request

from common.errors import InvalidRequest

CACHE_SALT = "baton.cache_salt"
"""Entry of a request's scope: the salt of its API key."""

MAX_SALT_LENGTH = 128


def check_salt(cache_salt: str | None) -> None:
    """Raise InvalidRequest when a client's salt is out of its bounds."""
    if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_LENGTH:
        raise InvalidRequest(f"cache_salt must have between 1 and {MAX_SALT_LENGTH} characters", param="cache_salt")


def salt_of(request: Request, cache_salt: str | None) -> str:
    """Return the salt of a request whose body says ``cache_salt``."""
    of_key: str = request.scope.get(CACHE_SALT, "")
    return join_salt(of_key, cache_salt)


def join_salt(of_key: str, cache_salt: str | None) -> str:
    """Return the salt of requests with a key's salt and a ``cache_salt`` of their own, if they have one."""
    if cache_salt is None:
        return of_key
    digest = hashlib.blake2b(cache_salt.encode(), digest_size=16, person=b"baton-req-salt")
    return f"{of_key}/{digest.hexdigest()}"

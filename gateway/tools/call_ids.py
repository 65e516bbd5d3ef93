"""Ids of calls, by which clients match results. Mistral's chat templates refuse any that are not nine characters."""

import secrets
import string

_LETTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """Return an id that no other call has."""
    return f"call_{secrets.token_hex(12)}"


def new_short_call_id() -> str:
    """Return an id of nine letters and digits."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))

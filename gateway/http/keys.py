"""Who may do what: API keys for clients, an admin key for calls that drain workers or show what they hold.

Keys are compared in constant time, and with all of them whichever fits. Clients with different keys share no cached
blocks, since the time to a first token would tell one what another has asked, unless the operator lets them.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence

from common.errors import Unauthorized

_SALT_BYTES = 16


class Keys:
    """The keys of one gateway. Without an API key any client is served.

    Without an admin key, admin calls are served only where ``is_private``: the gateway listens on loopback alone and
    asks clients for no key either.
    """

    def __init__(self, api_keys: Sequence[str], admin_key: str, *, is_private: bool, share_prefixes: bool) -> None:
        self._api_keys = [key.encode() for key in api_keys]
        self._admin_key = admin_key.encode()
        self._is_private = is_private
        self._salts = ["" if share_prefixes else _salt(key) for key in self._api_keys]

    def salts(self) -> list[str]:
        """Return the salts that clients can have."""
        return self._salts or [""]

    def check_client(self, sent: str) -> str:
        """Return the cache salt of the client that sent this key; raises Unauthorized."""
        if not self._api_keys:
            return ""
        matches = [hmac.compare_digest(sent.encode(), known) for known in self._api_keys]
        if not any(matches):
            raise Unauthorized("the API key is missing or wrong")
        return self._salts[matches.index(True)]

    def check_admin(self, sent: str) -> None:
        """Raise Unauthorized unless this key may make admin calls."""
        if self._admin_key:
            if not hmac.compare_digest(sent.encode(), self._admin_key):
                raise Unauthorized("the admin key is missing or wrong")
        elif self._api_keys or not self._is_private:
            raise Unauthorized("admin calls need a gateway that was started with --admin-key")

    def is_admin(self, sent: str) -> bool:
        """Whether this key may make admin calls."""
        try:
            self.check_admin(sent)
        except Unauthorized:
            return False
        return True


def bearer(headers: Mapping[str, str]) -> str:
    """Return the key that a request carries; empty without one."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _salt(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=_SALT_BYTES, person=b"baton-salt").hexdigest()

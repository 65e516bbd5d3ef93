"""Connections to other workers, one client an address, shared by everything in this process that calls them.

A client is made when it is first asked for and closed when nobody has used it for a while; gRPC reconnects by itself
in between, so a peer that restarts on its address keeps its client.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from common.rpc import RpcClient
from common.tls import Tls

IDLE_S = 300.0
"""A client that is unused for this long is closed."""


class _Peer:
    __slots__ = ("client", "last_used_s", "num_users")

    def __init__(self, client: RpcClient) -> None:
        self.client = client
        self.num_users = 0
        self.last_used_s = 0.0


class PeerSet:
    """All clients of one worker. Owned by its host; :meth:`close` ends every call that still runs."""

    def __init__(
        self,
        token: str,
        tls: Tls | None = None,
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._tls = tls
        self._idle_s = idle_s
        self._clock = clock
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def get(self, address: str) -> RpcClient:
        """Return the client for a call to ``address`` that is made now and does not outlast the idle time."""
        return self._touch(address).client

    @contextmanager
    def use(self, address: str) -> Iterator[RpcClient]:
        """Keep the client for ``address`` open while the context lasts."""
        peer = self._touch(address)
        peer.num_users += 1
        try:
            yield peer.client
        finally:
            peer.num_users -= 1
            peer.last_used_s = self._clock()

    async def close_idle(self) -> None:
        """Close the clients that nobody uses or has used within the idle time."""
        oldest_s = self._clock() - self._idle_s
        idle = [address for address, peer in self._peers.items() if not peer.num_users and peer.last_used_s < oldest_s]
        for peer in [self._peers.pop(address) for address in idle]:
            await peer.client.close()

    async def close(self) -> None:
        """Close all clients."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            await peer.client.close()

    def _touch(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(RpcClient(address, self._token, self._tls))
        peer.last_used_s = self._clock()
        return peer

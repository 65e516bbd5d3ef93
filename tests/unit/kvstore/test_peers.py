"""Clients by address, on a virtual clock; none of them connects."""

import pytest

from kvstore.peers import PeerSet

pytestmark = pytest.mark.anyio

A, B = "127.0.0.1:1", "127.0.0.1:2"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_an_address_has_one_client():
    peers = PeerSet("token")
    assert peers.get(A) is peers.get(A)
    assert peers.get(A) is not peers.get(B)
    assert len(peers) == 2
    await peers.close()
    assert len(peers) == 0


async def test_a_client_that_is_not_used_is_closed_and_made_anew():
    clock = Clock()
    peers = PeerSet("token", idle_s=10, clock=clock)
    first = peers.get(A)
    clock.now = 6
    peers.get(B)
    clock.now = 11
    await peers.close_idle()
    assert len(peers) == 1
    assert peers.get(A) is not first
    await peers.close()


async def test_a_client_in_use_is_never_idle():
    clock = Clock()
    peers = PeerSet("token", idle_s=10, clock=clock)
    with peers.use(A) as client, peers.use(A):
        clock.now = 100
        await peers.close_idle()
        assert peers.get(A) is client
    clock.now = 111
    await peers.close_idle()
    assert len(peers) == 0

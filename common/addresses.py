"""Addresses that processes listen on, and those that others reach them at."""

import ipaddress
import socket

_ANY_PORT = 9
"""The route to a machine is the same for each of its ports."""


def is_loopback(host: str) -> bool:
    """Say whether only this machine can reach what listens on ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def with_port(host: str, port: int) -> str:
    """Return ``host:port``, an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def reachable(address: str, peer: str) -> str:
    """Return ``address`` (``host:port``) as others can connect to it.

    A host that stands for every interface is replaced by the one from which this machine reaches ``peer``, or by the
    machine's name where that says nothing to others. Sends nothing; asks the name service for ``peer``.
    """
    host, _, port = address.rpartition(":")
    if not _is_every_interface(host):
        return address
    source = _source_towards(peer)
    return with_port(source if source and not is_loopback(source) else socket.gethostname(), int(port))


def _is_every_interface(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _source_towards(peer: str) -> str:
    """Return the address of the interface that packets to ``peer`` leave by; empty when there is none."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(peer, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket: this only looks up the route
            return str(probe.getsockname()[0])
    except OSError:
        return ""

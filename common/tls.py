"""Mutual TLS between processes: each shows a certificate of the cluster's authority, and accepts no other.

The shared token stays: a certificate says that a process belongs to the cluster, the token that it was told so now.
"""

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """One process's key and certificate, and the authority that signs everybody's; PEM."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return what a server listens with; callers must show a certificate."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], root_certificates=self.authority, require_client_auth=True
        )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return what a client connects with; a server's certificate must name the address that is called."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


def check_tls(certificate: str, key: str, authority: str) -> None:
    """Raise ConfigError unless all of ``--tls-cert``, ``--tls-key`` and ``--tls-ca`` are given, or none."""
    if any((certificate, key, authority)) and not all((certificate, key, authority)):
        raise ConfigError("--tls-cert, --tls-key and --tls-ca belong together: give all of them or none")


def load_tls(certificate: str, key: str, authority: str) -> Tls | None:
    """Read the three files; None when none is named. Raises ConfigError for a file that cannot be read."""
    if not certificate:
        return None
    return Tls(_read("--tls-cert", certificate), _read("--tls-key", key), _read("--tls-ca", authority))


def _read(flag: str, path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN " not in content:
        raise ConfigError(f"{flag} {path} is not a PEM file")
    return content

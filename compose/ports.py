"""TCP ports on this machine."""

import socket

from common.errors import ConfigError


def free_port(host: str) -> int:
    """Return a port that nobody listens on at ``host`` now."""
    with _bound(host, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def check_port(host: str, port: int) -> None:
    """Raise ConfigError unless ``host:port`` can be listened on."""
    try:
        _bound(host, port).close()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror}); choose others with --host, --port"
        ) from error


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener

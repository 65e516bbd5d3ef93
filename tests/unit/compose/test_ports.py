"""Ports of this machine."""

import socket

import pytest

from common.errors import ConfigError
from compose.ports import check_port, free_port


def test_a_free_port_can_be_listened_on() -> None:
    port = free_port("127.0.0.1")
    check_port("127.0.0.1", port)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            check_port("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_named() -> None:
    with pytest.raises(ConfigError, match="--host"):
        check_port("203.0.113.1", 1)

"""What a worker tells others about where it is."""

import socket

from common.addresses import reachable


def test_an_address_of_one_interface_is_given_as_it_is() -> None:
    assert reachable("10.1.2.3:7000", "redis.example") == "10.1.2.3:7000"
    assert reachable("[::1]:7000", "redis.example") == "[::1]:7000"
    assert reachable("worker-3:7000", "redis.example") == "worker-3:7000"


def test_where_only_this_machine_is_in_sight_its_name_is_given() -> None:
    assert reachable("0.0.0.0:7000", "127.0.0.1") == f"{socket.gethostname()}:7000"
    assert reachable("[::]:7000", "") == f"{socket.gethostname()}:7000"

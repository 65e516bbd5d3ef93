"""Options: wrong ones are named by their flag."""

from typing import Any

import pytest

from common.errors import ConfigError
from gateway.config import GatewayConfig


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"model": ""}, "--model"),
        ({"port": -1}, "--port"),
        ({"port": 70_000}, "--port"),
        ({"max_requests": 0}, "--max-requests"),
        ({"max_body_bytes": 0}, "--max-body-bytes"),
        ({"max_stop_strings": 0}, "--max-stop-strings"),
        ({"local_prefill_tokens": -1}, "--local-prefill-tokens"),
        ({"request_timeout_s": 0}, "--request-timeout-s"),
        ({"keep_alive_s": float("nan")}, "--keep-alive-s"),
        ({"drain_seconds": -1}, "--drain-seconds"),
        ({"api_key": ("",)}, "--api-key"),
    ],
)
def test_a_wrong_option_is_named(changes: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        GatewayConfig(**({"model": "m"} | changes))


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [("/a/b/", "", "b"), ("org/name", "", "name"), ("/a/b", "nice", "nice"), ("plain", "", "plain")],
)
def test_the_name_of_the_model(model: str, served: str, name: str) -> None:
    assert GatewayConfig(model, served_model_name=served).model_name == name

"""``baton up`` as it is typed: without any option, with its own, and with those of its processes."""

from collections.abc import Sequence

import pytest

from compose import up_command
from compose.commands import baton
from compose.passed_on import PassedOn
from compose.up_config import UpConfig


@pytest.mark.parametrize(
    ("argv", "config", "workers"),
    [
        ((), UpConfig(), {}),
        (("--prefill", "2"), UpConfig(prefill=2), {}),
        (("--preemption", "swap"), UpConfig(), {"preemption": "swap"}),
        (("--decode", "3", "--preemption", "swap"), UpConfig(decode=3), {"preemption": "swap"}),
    ],
)
def test_what_is_typed_is_what_is_started(
    argv: Sequence[str], config: UpConfig, workers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[UpConfig, PassedOn]] = []

    async def up(config: UpConfig, passed: PassedOn) -> None:
        started.append((config, passed))

    monkeypatch.setattr(up_command, "_up", up)
    app = baton()
    app(["up", *argv], result_action="return_value")
    assert started == [(config, PassedOn(workers=workers))]

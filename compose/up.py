"""``baton up``: a whole cluster on this machine, from a model's name to an address that answers.

SIGINT or SIGTERM, at any point, ends everything that was started, in order; a second one ends it at once.
"""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from common.errors import BatonError, ConfigError
from compose.console import note
from compose.first_of import first_of
from compose.local_cluster import LocalCluster
from compose.passed_on import PassedOn
from compose.ports import check_port, free_port
from compose.supervisor import Supervisor
from compose.up_config import UpConfig


async def up(config: UpConfig, passed: PassedOn) -> None:
    """Run a cluster until SIGINT or SIGTERM; raises BatonError when it cannot be started."""
    port = config.port or free_port(config.host)
    check_port(config.host, port)
    log_dir = _make_folder((config.log_dir or state_dir() / f"port-{port}").absolute())
    failure: BatonError | None = None
    async with asyncio.TaskGroup() as group:
        supervisor = Supervisor(log_dir, group)
        stop = _on_signals(supervisor.kill)
        cluster = LocalCluster(config, passed, port, supervisor)
        try:
            await first_of(stop.wait(), cluster.run())
        except BatonError as error:
            failure = error
        finally:
            await cluster.stop()
    if failure is not None:
        raise failure


def state_dir() -> Path:
    """Return Baton's folder for what is worth keeping but can be lost, such as logs."""
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "baton"


def _make_folder(log_dir: Path) -> Path:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--log-dir {log_dir} cannot be made: {error.strerror}") from error
    return log_dir


def _on_signals(again: Callable[[], None]) -> asyncio.Event:
    """Return an event that the first SIGINT or SIGTERM sets; every further one calls ``again``."""
    stop = asyncio.Event()

    def receive() -> None:
        if stop.is_set():
            note("ending everything now")
            again()
            return
        note("stopping; once more to end at once")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, receive)
    return stop

"""The processes of one cluster on this machine: starts them, keeps them running, stops them in order.

Life: :meth:`start` as often as needed, :meth:`mark_ready` once the cluster answers, :meth:`stop` with the order. It
does not know what the processes do.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from common.errors import Unavailable
from compose.child import ChildSpec
from compose.keeper import Keeper


class Supervisor:
    """Owns every child and the task that keeps it."""

    def __init__(self, log_dir: Path, group: asyncio.TaskGroup) -> None:
        self.log_dir = log_dir
        self._group = group
        self._keepers: list[Keeper] = []
        self._ready = False
        self._given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def start(self, spec: ChildSpec) -> Keeper:
        """Start a child and keep it running."""
        keeper = Keeper(spec, self.log_dir, lambda: self._ready)
        keeper.log_path.write_bytes(b"")
        self._keepers.append(keeper)
        self._group.create_task(self._keep(keeper))
        return keeper

    def mark_ready(self) -> None:
        """Say that the cluster has answered: from here on nothing is given up, and only warnings are shown."""
        self._ready = True

    async def wait_given_up(self) -> None:
        """Wait until a child is given up; raises Unavailable that says why."""
        raise Unavailable(await asyncio.shield(self._given_up))

    async def stop(self, *stages: Sequence[Keeper]) -> None:
        """Stop the children, one stage after the other, those of a stage together."""
        for stage in stages:
            await asyncio.gather(*(keeper.stop() for keeper in stage))

    def kill(self) -> None:
        """End all children at once."""
        for keeper in self._keepers:
            keeper.kill()

    async def _keep(self, keeper: Keeper) -> None:
        complaint = await keeper.run()
        if complaint is not None and not self._given_up.done():
            self._given_up.set_result(complaint)

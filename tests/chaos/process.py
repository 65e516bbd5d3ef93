"""One process of a chaos cluster, started again whenever it dies, without a pause."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compose import tether


@dataclass(slots=True)
class Process:
    """Keeps ``argv`` running from :meth:`start` to :meth:`stop`; its output goes to ``log``."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    stdin: bytes = b""
    num_starts: int = 0
    exits: list[int] = field(default_factory=list)
    _process: asyncio.subprocess.Process | None = None
    _task: "asyncio.Task[None] | None" = None
    _restarts: bool = True

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End it for good, at once."""
        self._restarts = False
        self.send(signal.SIGKILL)
        if self._task is not None:
            await self._task

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process that runs now, if it is still a child of ours."""
        process = self._process
        if process is not None and process.returncode is None and _parent(process.pid) == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    async def _keep(self) -> None:
        while self._restarts:
            self.num_starts += 1
            with self.log.open("ab") as log:
                self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid())),
                    *self.argv,
                    env=dict(self.env),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            self._process.stdin.write(self.stdin)
            self._process.stdin.close()
            self.exits.append(await self._process.wait())


def _parent(pid: int) -> int | None:
    """Return the parent of a process, None when there is no such process. Linux only."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None

"""One child process, from its start to its end.

Every child runs in a process group of its own, so that Ctrl-C reaches only the supervisor, and is tethered to the
supervisor, so that it ends when that is killed. All are in one session: Linux may share processors out by session
(autogroup), and would not compare the nice values of two. Output goes to the child's log file; what a person should see
also to stderr.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from compose import tether
from compose.log_lines import LogLines

_CHUNK_BYTES = 65536
_TAIL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run."""

    name: str
    """Stable name, unique among the children; the log is ``name.log``."""
    argv: tuple[str, ...]
    """Absolute path of the program, and its arguments; no secrets."""
    env: Mapping[str, str]
    """The whole environment."""
    stop_s: float = 10.0
    """Seconds from SIGTERM to SIGKILL."""
    stdin: bytes = b""
    """Written to its standard input, which is then closed."""


class Child:
    """One running process. Owned by whoever started it, who awaits :meth:`wait`."""

    def __init__(self, spec: ChildSpec, process: asyncio.subprocess.Process, log_path: Path) -> None:
        self.spec = spec
        self._process = process
        self._log_path = log_path

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""
        return self._process.pid

    async def wait(self, show: Callable[[str], None], quiet: Callable[[], bool]) -> int:
        """Copy its output until it ends and return its exit status, negative for a signal; leaves none of its own
        children behind. ``show`` gets the lines for a person, fewer while ``quiet()``."""
        with self._log_path.open("ab", buffering=0) as log_file:
            pump = asyncio.create_task(self._pump(log_file, show, quiet))
            try:
                status = await self._process.wait()
            finally:
                self.kill()
                await pump
        return status

    def terminate(self) -> None:
        """Ask it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything in its group; harmless when it has ended."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # macOS answers the second for a zombie
            self._signal(signal.SIGKILL)  # it may be too young to have its group

    def log_tail(self, num_lines: int) -> str:
        """Return the last lines of its log."""
        data = self._log_path.read_bytes()[-_TAIL_BYTES:]
        return "\n".join(data.decode(errors="replace").splitlines()[-num_lines:])

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            self._process.send_signal(number)

    async def _pump(self, log_file: BinaryIO, show: Callable[[str], None], quiet: Callable[[], bool]) -> None:
        assert self._process.stdout is not None
        lines = LogLines()
        while data := await self._process.stdout.read(_CHUNK_BYTES):
            log_file.write(data)
            for line in lines.feed(data, quiet=quiet()):
                show(line)


async def start_child(spec: ChildSpec, log_path: Path) -> Child:
    """Start ``spec``; raises OSError when the program cannot be run."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid())),
        *spec.argv,
        env=dict(spec.env),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdin is not None
    with contextlib.suppress(OSError, RuntimeError):  # killed the moment it was born, as by Ctrl-C: its end is seen
        process.stdin.write(spec.stdin)
        process.stdin.close()
    return Child(spec, process, log_path)

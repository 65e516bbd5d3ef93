"""Keeps one child running: starts it, waits for its end, starts it again with a pause, until told to stop."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from compose.child import Child, ChildSpec, start_child
from compose.console import note
from compose.restart_policy import RestartPolicy

_TAIL_LINES = 12


class Keeper:
    """The lives of one child, one after the other. Owned by the supervisor, which runs :meth:`run` as a task."""

    def __init__(self, spec: ChildSpec, log_dir: Path, is_ready: Callable[[], bool]) -> None:
        self.spec = spec
        self.log_path = log_dir / f"{spec.name}.log"
        self.starts = 0
        self._is_ready = is_ready
        self._policy = RestartPolicy()
        self._child: Child | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    async def run(self) -> str | None:
        """Keep the child running until :meth:`stop`; return None then, or why it was given up."""
        try:
            while not self._stopping.is_set():
                complaint = await self._live_once()
                if complaint is not None:
                    return complaint
            return None
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Ask the child to end, kill it when it has not within its ``stop_s``, and wait until it is gone."""
        self._stopping.set()
        if self._child is not None:
            self._child.terminate()
        try:
            async with asyncio.timeout(self.spec.stop_s):
                await self._ended.wait()
        except TimeoutError:
            note(f"{self.spec.name} did not stop within {self.spec.stop_s:g} s and is killed")
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        """End the child at once."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _live_once(self) -> str | None:
        clock = asyncio.get_running_loop().time
        began = clock()
        self.starts += 1
        self._child = await start_child(self.spec, self.log_path)
        if self._stopping.is_set():  # stop came while it was being started
            self._child.terminate()
        status = await self._child.wait(self._show, self._is_ready)
        if self._stopping.is_set():
            return None
        delay_s = self._policy.delay_s(status, clock() - began, was_ready=self._is_ready())
        if delay_s is None:
            return (
                f"{self.spec.name} {_ending(status)}; the end of {self.log_path}:\n{self._child.log_tail(_TAIL_LINES)}"
            )
        note(f"{self.spec.name} {_ending(status)}; it is started again in {delay_s:g} s (log: {self.log_path})")
        await self._pause(delay_s)
        return None

    async def _pause(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
        except TimeoutError:
            return

    def _show(self, line: str) -> None:
        note(f"{self.spec.name} | {line}")


def _ending(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"

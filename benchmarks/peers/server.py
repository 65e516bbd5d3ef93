"""An engine that serves over HTTP, from its start to its end."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from common.errors import Unavailable

START_LIMIT_S = 900.0
"""vLLM compiles at its first start; on a busy machine that takes minutes."""
STOP_LIMIT_S = 40.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class ServerCommand:
    """How to start a server."""

    argv: Sequence[str]
    env: Mapping[str, str]
    port: int
    ready_path: str
    """Answered with status 200 once requests can be served."""
    model: str
    """Name that requests give."""


@dataclass(frozen=True, slots=True)
class Server:
    """One that runs and is ready."""

    url: str
    model: str
    start_s: float
    """Seconds from the start of the process until it was ready."""


@contextmanager
def serving(command: ServerCommand, log: Path) -> Iterator[Server]:
    """Start a server, wait until it is ready, and end it with all its processes. Raises Unavailable."""
    log.parent.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{command.port}"
    began = time.perf_counter()
    with log.open("wb") as said:
        process = subprocess.Popen(
            command.argv,
            env=os.environ | command.env,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_ready(process, url + command.ready_path, log)
            yield Server(url, command.model, time.perf_counter() - began)
        finally:
            _end(process)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    give_up_at = time.monotonic() + START_LIMIT_S
    with httpx2.Client(trust_env=False, timeout=5.0) as client:
        while not _is_ready(client, url):
            if process.poll() is not None:
                raise Unavailable(f"it ended with status {process.returncode}: {last_line(log)}")
            if time.monotonic() > give_up_at:
                raise Unavailable(f"it was not ready within {START_LIMIT_S:g} s: {last_line(log)}")
            time.sleep(POLL_S)


def _is_ready(client: httpx2.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx2.HTTPError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process as its users would; then whatever is left of its session."""
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def last_line(log: Path) -> str:
    """Return the last line of a log that says something."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"

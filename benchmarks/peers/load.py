"""What the client process is asked to send, and what it saw.

The client is a process of its own (:mod:`benchmarks.peers.client`), so that nothing else keeps it from reading a clock
when a token arrives; it uses the load generator of ``baton bench serve`` and says how late it was itself.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

import msgspec

from common.errors import Unavailable

POLL_S = 0.5


class Request(msgspec.Struct, frozen=True):
    """One request."""

    prompt: Sequence[int]
    """Token ids."""
    answer: int
    """Tokens to write."""
    at_s: float = 0.0
    """When to send it, in seconds from the start."""


class Stream(msgspec.Struct, frozen=True):
    """Requests that are sent when they are due."""

    requests: Sequence[Request]
    at_once: int = 0
    """Requests in flight at most; 0: no limit."""
    timeout_s: float = 300.0
    """A request that has not ended by then is given up; the tokens that it had count."""


class Load(msgspec.Struct, frozen=True):
    """Streams that are sent side by side to one server."""

    url: str
    model: str
    streams: Sequence[Stream]


class Seen(msgspec.Struct, frozen=True):
    """One answer. Seconds from the start of the load."""

    sent_s: float
    token_times_s: list[float]
    prompt_len: int
    answer_len: int
    cached: int
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token; infinite when none came."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else float("inf")

    @property
    def itls_s(self) -> list[float]:
        """Gaps between tokens."""
        return [later - at for at, later in zip(self.token_times_s, self.token_times_s[1:], strict=False)]


class Observed(msgspec.Struct, frozen=True):
    """What the client saw, a list for each stream, and how well it could see."""

    streams: list[list[Seen]]
    lag_p99_ms: float
    late_p99_ms: float
    cpu_share: float
    warnings: list[str]


def drive(load: Load, meanwhile: Callable[[], None] = lambda: None) -> Observed:
    """Send a load from a process of its own; ``meanwhile`` is called now and then. Raises Unavailable."""
    command = (sys.executable, "-m", "benchmarks.peers.client")
    with (
        tempfile.TemporaryFile() as said,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said) as client,
    ):
        try:
            assert client.stdin is not None
            client.stdin.write(msgspec.json.encode(load))
            client.stdin.close()
            while _is_running(client):
                meanwhile()
        finally:
            client.kill()
        if client.returncode != 0:
            raise Unavailable(f"the client ended with status {client.returncode}")
        said.seek(0)
        return msgspec.json.decode(said.read(), type=Observed)


def _is_running(client: subprocess.Popen[bytes]) -> bool:
    try:
        client.wait(POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False

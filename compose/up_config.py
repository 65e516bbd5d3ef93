"""Options of ``baton up`` itself; every field is a flag and a ``BATON_…`` variable.

Those that it passes on to its processes are in :mod:`compose.passed_on`.
"""

from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError
from compose.smollm2 import NAME


@dataclass(frozen=True, slots=True)
class UpConfig:
    """Start a cluster on this machine: a gateway, prefill workers, decode workers and, if none is given, Redis."""

    model: str = NAME
    """Model to serve: the name of one that Baton prepares, a folder, or OWNER/NAME on the model hub."""

    prefill: int = 1
    """Prefill workers to start; with 0 the decode workers read the prompts too."""

    decode: int = 1
    """Decode workers to start, at least one."""

    host: str = "127.0.0.1"
    """Address that the HTTP server listens on; workers always stay on the loopback interface."""

    port: int = 8000
    """Port that the HTTP server listens on; 0 takes a free one."""

    redis: str = ""
    """URL of a Redis server, version 7.2 or newer; empty: start an embedded one."""

    threads: int = 0
    """Compute threads of each worker; 0: the machine's cores divided among the workers."""

    log_dir: Path | None = None
    """Folder for the log files; the default is one for each port in the user's state folder."""

    def __post_init__(self) -> None:
        if self.prefill < 0:
            raise ConfigError(f"--prefill must be 0 or more, not {self.prefill}")
        if self.decode < 1:
            raise ConfigError(f"--decode must be 1 or more, not {self.decode}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if self.threads < 0:
            raise ConfigError(f"--threads must be 0 or more, not {self.threads}")

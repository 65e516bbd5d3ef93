"""Asks ``baton fetch-model`` for a model's folder, in a process of its own.

So a start that is interrupted can end the download or conversion at once, and torch's memory goes away with it.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from common.cli import EXIT_BAD_CONFIG
from common.errors import ConfigError, Unavailable
from compose import tether


async def fetch_model(source: str, env: Mapping[str, str]) -> Path:
    """Return the folder of the model ``source``; progress goes to stderr.

    Raises ConfigError when there is no such model, Unavailable when it cannot be had now.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", tether.__file__, str(os.getpid())),
        *(sys.executable, "-P", "-m", "compose.cli", "fetch-model", source),
        env=dict(env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        raise
    if process.returncode == 0:
        return Path(output.decode().strip().splitlines()[-1])
    error_type = ConfigError if process.returncode == EXIT_BAD_CONFIG else Unavailable
    raise error_type(f"the model {source} could not be prepared; why is said above")

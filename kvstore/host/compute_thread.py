"""The one thread that touches the model, and how far it steps back for everything else on the machine.

Steps keep cores busy without a pause. Whatever runs for a moment and is waited for, such as an event loop or the decode
step of a worker beside this one, should have a core the moment it asks. Linux knows a nice value for each thread, and a
thread gets that of the one that starts it; so it holds for the helper threads of torch and of the compiled kernels too.
Everybody may raise it, but only the privileged may lower it: a thread that is to be less nice has to be a new one.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

log = logging.getLogger(__name__)

T = TypeVar("T")


class ComputeThread:
    """Owns the one thread that touches the model and, through it, the KV tensor."""

    def __init__(self) -> None:
        self._nice = 0
        self._pool = _start(self._nice)

    def set_nice(self, nice: int) -> None:
        """Go on with a thread that is ``nice`` steps nicer than its process; called while nothing runs on it."""
        if nice == self._nice:
            return
        self._nice = nice
        self._pool.shutdown(wait=False)
        self._pool = _start(nice)

    def submit(self, function: Callable[[], object]) -> None:
        """Let ``function`` be called on the thread; it sees to its own errors."""
        self._pool.submit(function)

    async def call(self, function: Callable[[], T]) -> T:
        """Return what ``function`` returns on the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def close(self) -> None:
        """Wait for what runs and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _start(nice: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute", initializer=partial(_begin, nice))


def _begin(nice: int) -> None:
    """Make the calling thread nicer, where threads have a nice value of their own, and tell torch's libraries."""
    torch.set_num_threads(torch.get_num_threads())  # oneDNN and MKL know it by calling thread, torch once for all
    if nice and sys.platform == "linux":
        os.nice(nice)
    elif nice:
        log.debug("compute threads have the priority of their process: only Linux tells threads apart")

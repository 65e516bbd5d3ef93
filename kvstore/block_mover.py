"""Runs the copies between block storage and frames where they hurt least.

On a CPU a frame is one pass of memory copy and checksum, a fraction of a millisecond for 2 MiB; a thread would cost as
much again and take turns with the event loop for the interpreter. On another device a copy waits for the kernels
queued before it, so there it runs in a thread of its own.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


class BlockMover:
    """Owned by one end of transfers; copies run one at a time, in order."""

    def __init__(self, *, in_thread: bool) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="block-mover") if in_thread else None

    @classmethod
    def for_device(cls, device: torch.device) -> "BlockMover":
        """Return the mover that suits blocks on ``device``."""
        return cls(in_thread=device.type != "cpu")

    async def run(self, copy: Callable[[], Result]) -> Result:
        """Return what ``copy`` returns. When this is cancelled, ``copy`` has ended or will never begin."""
        if self._thread is None:
            return copy()
        running = self._thread.submit(copy)
        ended = asyncio.wrap_future(running)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not running.cancel():
                await _wait_ended(ended)
            raise


async def _wait_ended(future: asyncio.Future[Result]) -> None:
    """Wait for ``future`` however often this task is cancelled meanwhile; the caller raises the cancellation."""
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue
    if not future.cancelled():
        future.exception()  # taken note of, so that it is not reported as lost

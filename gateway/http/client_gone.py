"""Noticing that a client has left, while something else is awaited.

Starlette does not cancel a handler whose client has left, so whatever takes long is raced against the disconnect.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client has closed its connection; there is nobody to answer."""


async def race(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return what ``work`` returns; cancel it and raise ClientGone when the client leaves first.

    The request's body must have been read.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_wait_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait((working, leaving))


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

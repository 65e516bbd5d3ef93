"""Several coroutines until one ends."""

import asyncio

import pytest

from common.errors import Unavailable
from compose.first_of import first_of

pytestmark = pytest.mark.anyio


async def test_the_others_are_cancelled_and_waited_for() -> None:
    ended: list[str] = []

    async def wait_forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    await first_of(wait_forever(), asyncio.sleep(0))
    assert ended == ["cleaned up"]


async def test_its_error_is_raised() -> None:
    async def fail() -> None:
        raise Unavailable("gone")

    with pytest.raises(Unavailable, match="gone"):
        await first_of(asyncio.Event().wait(), fail())

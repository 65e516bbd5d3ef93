"""What every control message travels in: a checksum, and on a stream a number.

TCP's own checksum misses what is damaged inside a host or a proxy, and gRPC adds none. A changed token id would be a
wrong answer with status 200, so a message whose checksum is wrong is an error, and so is a stream in which a message
is missing, repeated or out of order. A stream that has nothing to say sends empty messages, *beats*, so that a lost
last message and a silent peer are noticed within seconds.

    sealed message:   xxh3-64 of the rest, message
    stream element:   xxh3-64 of the rest, number (uint32, from 0), message; a beat has no message
"""

import asyncio
import struct
from collections.abc import AsyncGenerator
from typing import TypeVar

import xxhash

from common.errors import CorruptFrame

BEAT_S = 1.0
"""A stream is never silent for longer than this, plus what the network and the peer's event loop take."""

SILENCE_S = 6.0
"""A stream that is silent for this long has lost its peer."""

_CHECKSUM = struct.Struct("<Q")
_NUMBER = struct.Struct("<I")

Item = TypeVar("Item")


def seal(message: bytes) -> bytes:
    """Return ``message`` with its checksum."""
    return _CHECKSUM.pack(xxhash.xxh3_64_intdigest(message)) + message


def unseal(data: bytes) -> bytes:
    """Return the message in ``data``; raises CorruptFrame when it is not what was sealed."""
    message = data[_CHECKSUM.size :]
    if data[: _CHECKSUM.size] != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(message)):
        raise CorruptFrame("the checksum of a message is wrong")
    return message


class StreamSealer:
    """Numbers and seals what one side of a stream sends. Owned by that side's only writer."""

    def __init__(self) -> None:
        self._num_sealed = 0

    def seal(self, message: bytes) -> bytes:
        """Return the next element; an empty ``message`` is a beat."""
        element = seal(_NUMBER.pack(self._num_sealed & 0xFFFFFFFF) + message)
        self._num_sealed += 1
        return element


class StreamOpener:
    """Checks what one side of a stream receives. Owned by that side's only reader."""

    def __init__(self) -> None:
        self._num_opened = 0

    def open(self, element: bytes) -> bytes:
        """Return the message, empty for a beat; raises CorruptFrame unless it is the very next one, undamaged."""
        body = unseal(element)
        if body[: _NUMBER.size] != _NUMBER.pack(self._num_opened & 0xFFFFFFFF):
            raise CorruptFrame(f"message {self._num_opened} of a stream is missing")
        self._num_opened += 1
        return body[_NUMBER.size :]


async def with_beats(items: AsyncGenerator[Item, None], every_s: float = BEAT_S) -> AsyncGenerator[Item | None, None]:
    """Yield what ``items`` yields, and None whenever nothing has come for ``every_s``. Closes ``items`` at the end."""
    done = object()
    coming: asyncio.Future[object] | None = None
    try:
        while True:
            coming = coming or asyncio.ensure_future(anext(items, done))
            await asyncio.wait((coming,), timeout=every_s)
            if not coming.done():
                yield None
                continue
            item, coming = coming.result(), None
            if item is done:
                return
            yield item  # type: ignore[misc]
    finally:
        if coming is not None:
            coming.cancel()
            await asyncio.wait((coming,))
        await items.aclose()

"""What a decode worker has to tell one gateway, gathered so that a step's tokens travel in one message."""

import asyncio
from collections.abc import AsyncIterator

from common.messages import SequenceOutput, SessionDown, Tokens


class Outbox:
    """Messages for one session, in order. Bounded by what its sequences may produce; a slow reader gets fewer,
    larger messages."""

    def __init__(self) -> None:
        self._messages: list[SessionDown] = []
        self._outputs: list[SequenceOutput] = []
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, message: SessionDown) -> None:
        """Send ``message`` after everything that was put before it."""
        self._gather()
        self._messages.append(message)
        self._ready.set()

    def put_output(self, output: SequenceOutput) -> None:
        """Send ``output`` together with others of its step."""
        self._outputs.append(output)
        self._ready.set()

    @property
    def is_closed(self) -> bool:
        """Whether nobody waits for more."""
        return self._closed

    def close(self) -> None:
        """End the stream once everything was sent."""
        self._closed = True
        self._ready.set()

    async def messages(self) -> AsyncIterator[SessionDown]:
        """Yield what is put, until :meth:`close`."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            self._gather()
            messages, self._messages = self._messages, []
            for message in messages:
                yield message
            if self._closed and not self._outputs and not self._messages:
                return

    def _gather(self) -> None:
        if self._outputs:
            self._messages.append(Tokens(tuple(self._outputs)))
            self._outputs = []

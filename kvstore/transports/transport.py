"""How the bytes of a frame's blocks get from their source into this worker's own: the interface that every way has.

What may be read, and when, is said by the frames of a Pull stream, whatever the transport; so are leases, epochs and
the handover. A transport is one end of a way, opened once a process. Its ``offer`` goes to a puller with the source's
HelloReply; there the transport of the same name connects to it and gives a reader of that source.
"""

from collections.abc import Sequence
from typing import Protocol

from common.ids import BlockId
from common.messages import KvFrame


class TransportFailed(Exception):
    """The bytes cannot be had this way; they may be had another way. The message says why, for a log."""


class Reader(Protocol):
    """Reads the blocks of one source into this worker's own. Used on the event loop, by any number of pulls."""

    @property
    def name(self) -> str:
        """What the Pull must name for its frames to suit this reader."""

    async def fill(self, frame: KvFrame, block_ids: Sequence[BlockId]) -> None:
        """Put the bytes of a frame's blocks, checked, into ``block_ids``.

        Raises CorruptFrame when they are not what the source has summed, TransportFailed when they cannot be had.
        Nothing writes to ``block_ids`` any more once this has ended, in whatever way.
        """


class Transport(Protocol):
    """One worker's end of a way to read blocks. Owned by its process."""

    @property
    def name(self) -> str:
        """Stands for it in options, messages and logs."""

    async def run(self) -> None:
        """Do what must go on while others read; returns when there is nothing, else when cancelled."""

    def offer(self) -> bytes:
        """Return what the other end needs to connect."""

    def connect(self, detail: bytes) -> Reader:
        """Return a reader of the worker whose offer has this ``detail``; raises TransportFailed."""

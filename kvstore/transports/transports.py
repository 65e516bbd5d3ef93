"""The transports that a worker has beside gRPC, and which of them reads a given source's blocks."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from common.messages import TransportOffer
from kvstore.transports.transport import Reader, Transport, TransportFailed


@dataclass(frozen=True, slots=True)
class Choice:
    """How a source's blocks are read, and why not in a better way."""

    reader: Reader
    reason: str
    """Empty when nothing was tried before."""


@dataclass(frozen=True, slots=True)
class Transports:
    """What one worker has, the one that it prefers first. Owned by its process."""

    own: Sequence[Transport] = ()

    async def run(self) -> None:
        """Do what the transports have to do by themselves, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for transport in self.own:
                group.create_task(transport.run())

    def offers(self) -> tuple[TransportOffer, ...]:
        """Return what others need to read this worker's blocks."""
        return tuple(TransportOffer(transport.name, transport.offer()) for transport in self.own)

    def choose(self, offered: Sequence[TransportOffer], otherwise: Reader) -> Choice:
        """Return the first of ours that the source has too and that connects, else ``otherwise``."""
        details = {offer.name: offer.detail for offer in offered}
        reasons: list[str] = []
        for transport in self.own:
            if transport.name not in details:
                reasons.append(f"{transport.name}: the source does not have it")
                continue
            try:
                return Choice(transport.connect(details[transport.name]), "; ".join(reasons))
            except TransportFailed as failure:
                reasons.append(f"{transport.name}: {failure}")
        return Choice(otherwise, "; ".join(reasons))


GRPC_ONLY = Transports()

"""Prepares at a worker's start what ``--transport`` asks for; what cannot be had is logged, and gRPC does the rest."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from kvstore.storage import KvStorage
from kvstore.transports import nixl, shared_memory
from kvstore.transports.choices import TransportChoice
from kvstore.transports.nixl import NixlTransport
from kvstore.transports.shared_memory import SharedMemory, SharedMemoryTransport
from kvstore.transports.transport import Transport, TransportFailed
from kvstore.transports.transports import Transports

log = logging.getLogger(__name__)

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Lending:
    """What is settled before the pool exists: where it lies, and which transports are to read it."""

    choice: TransportChoice
    is_encrypted: bool
    memory: SharedMemory | None

    @classmethod
    def prepare(
        cls,
        choice: TransportChoice,
        device: torch.device,
        num_blocks: int,
        block_bytes: int,
        *,
        is_encrypted: bool = False,
    ) -> "Lending":
        """Make memory that can be shared, if ``choice`` comes to that for a pool on ``device``."""
        if shared_memory.NAME not in wanted(choice, device, is_encrypted):
            return cls(choice, is_encrypted, None)
        return cls(
            choice, is_encrypted, _try(choice, shared_memory.NAME, lambda: _share(device, num_blocks, block_bytes))
        )

    @property
    def pool_memory(self) -> NDArray[np.uint8] | None:
        """Where the storage must keep its blocks; None: where it likes."""
        return None if self.memory is None else self.memory.blocks

    def open_transports(self, storage: KvStorage) -> Transports:
        """Return the transports that work here, for blocks in ``storage``."""
        opened: list[Transport] = []
        if self.memory is not None:
            opened.append(SharedMemoryTransport(storage, self.memory))
        if nixl.NAME in wanted(self.choice, storage.device, self.is_encrypted):
            transport = _try(self.choice, nixl.NAME, lambda: NixlTransport(storage))
            opened += [] if transport is None else [transport]
        return Transports(tuple(opened))


def wanted(choice: TransportChoice, device: torch.device, is_encrypted: bool) -> tuple[str, ...]:
    """Return the transports beside gRPC that ``choice`` stands for on ``device``.

    Where calls are encrypted, NIXL, whose bytes are not, has to be asked for by name.
    """
    if choice != "auto":
        return () if choice == "grpc" else (choice,)
    if device.type == "cpu":
        return (shared_memory.NAME,)
    return () if is_encrypted else (nixl.NAME,)


def _share(device: torch.device, num_blocks: int, block_bytes: int) -> SharedMemory:
    if device.type != "cpu":
        raise TransportFailed(f"blocks on {device.type} are not in host memory")
    return SharedMemory(num_blocks, block_bytes)


def _try(choice: TransportChoice, name: str, make: Callable[[], Made]) -> Made | None:
    try:
        return make()
    except TransportFailed as failure:
        level = logging.INFO if choice == "auto" else logging.WARNING
        log.log(level, "the transport %s is not used: %s", name, failure)
        return None

"""What a host asks of the engine of a role, and how it finds one by the role's name.

Engines live in packages that the host does not import: a role is a name, so that a host can put one engine down and
take up another without losing its weights or its cached blocks.
"""

import importlib
from collections.abc import Iterable
from typing import Protocol

from common.ids import TransferId
from common.messages import Role, SequenceReport, SlotCounts, WorkerLoad
from common.rpc import Handlers
from kvstore.block_table import BlockTable
from kvstore.host.parts import Parts
from kvstore.outgoing import ReleaseReason


class Engine(Protocol):
    """One role at work. Owns its scheduler and the block tables of its sequences."""

    def handlers(self) -> Handlers:
        """Return the methods that this role serves."""
        ...

    async def run(self) -> None:
        """Work until cancelled."""
        ...

    async def drain(self) -> None:
        """Take nothing new; return when nothing is left."""
        ...

    async def hand_back(self) -> None:
        """After :meth:`drain` was cut short: end what is left so that others can go on with it; return when no
        sequence here holds a block."""
        ...

    def released(self, transfer_id: TransferId, reason: ReleaseReason) -> None:
        """A lease has ended: give its blocks back."""
        ...

    def load(self, now: float) -> WorkerLoad:
        """Return the load at ``now`` (monotonic seconds)."""
        ...

    def slots(self) -> SlotCounts:
        """Return how well the held blocks are filled."""
        ...

    def tables(self) -> Iterable[BlockTable]:
        """Return every block table that holds blocks."""
        ...

    def sequences(self) -> Iterable[SequenceReport]:
        """Return what each sequence here is doing, for people."""
        ...

    def counters(self) -> dict[str, int]:
        """Return monotonic counts since the start, by metric name."""
        ...


def create_engine(role: Role, parts: Parts) -> Engine:
    """Return a new engine for ``role``: ``create(parts)`` of the module ``<role>_worker.engine``."""
    engine: Engine = importlib.import_module(f"{role}_worker.engine").create(parts)
    return engine

"""What a decode scheduler decides for one step."""

from dataclasses import dataclass

from decode_worker.slots import Slot
from kvstore.block_table import BlockCopy
from kvstore.sequence import Chunk, Sequence


@dataclass(frozen=True, slots=True)
class Restore:
    """Blocks of ``sequence`` from the ``first_block``-th on are to be filled from host memory before the step."""

    sequence: Sequence
    first_block: int


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decision. ``chunks`` are computed together; ``pulls`` got blocks and wait for their bytes; ``started`` got
    blocks and are computed here; ``restored`` got blocks and have a chunk; ``preempted`` lost theirs.

    ``copies`` are to be made before all that, in order. Then ``saving`` is to be saved: nothing else is decided.
    """

    chunks: tuple[Chunk, ...]
    pulls: tuple[Slot, ...]
    started: tuple[Slot, ...]
    preempted: tuple[Slot, ...]
    copies: tuple[BlockCopy, ...]
    restored: tuple[Restore, ...] = ()
    saving: Slot | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing comes of it."""
        return not (self.chunks or self.pulls or self.saving)

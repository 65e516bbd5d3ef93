"""Host memory for the KV of preempted sequences, and whether using it is cheaper than computing again.

A sequence's blocks are copied out when it is preempted and back when it runs again, both on the compute thread, which
alone writes to them. What the two take is measured, as is what computing takes; that decides the next time.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from common.ids import BlockId
from decode_worker.step import Restore
from kvstore.sequence import Sequence
from kvstore.storage import KvStorage

PreemptionMode = Literal["auto", "recompute", "swap"]

_SMOOTHING = 0.3
"""Weight of the newest copy in the moving average."""


@dataclass(frozen=True, slots=True)
class _Saved:
    payload: bytes
    """Its blocks with computed KV, in order."""
    num_blocks: int


class SwapSpace:
    """Holds at most ``limit_bytes``. Owned by the decode engine and used on the event loop; the jobs that it returns
    run on the compute thread.

    ``compute_rate`` returns the prompt tokens a second that the model computes, 0 until measured.
    """

    def __init__(
        self, storage: KvStorage, mode: PreemptionMode, limit_bytes: int, compute_rate: Callable[[], float]
    ) -> None:
        self._counters = dict.fromkeys(("preemptions_swapped", "swapped_out_blocks", "swapped_in_blocks"), 0)
        self._storage = storage
        self._mode = mode
        self._free_bytes = limit_bytes
        self._compute_rate = compute_rate
        self._blocks_per_s = 0.0
        self._saved: dict[Sequence, _Saved] = {}

    def is_preferred(self, sequence: Sequence) -> bool:
        """Whether to save ``sequence``, which is preempted, rather than to compute it again.

        What was not measured yet is tried.
        """
        num_blocks = self._num_blocks(sequence)
        if self._mode == "recompute" or num_blocks * self._block_bytes > self._free_bytes:
            return False
        rate = self._compute_rate()
        if self._mode == "swap" or not self._blocks_per_s or not rate:
            return True
        return 2 * num_blocks / self._blocks_per_s < sequence.num_computed_tokens / rate

    def saving(self, sequence: Sequence) -> Callable[[], None]:
        """Return the job that copies the blocks of ``sequence`` out."""
        block_ids = tuple(sequence.table.block_ids[: self._num_blocks(sequence)])
        self._free_bytes -= len(block_ids) * self._block_bytes
        self._counters["preemptions_swapped"] += 1
        self._counters["swapped_out_blocks"] += len(block_ids)

        def save() -> None:
            began = time.monotonic()
            self._saved[sequence] = _Saved(self._storage.read(block_ids), len(block_ids))
            self._measure(len(block_ids), time.monotonic() - began)

        return save

    def restoring(self, restores: Seq[Restore]) -> Callable[[], None]:
        """Return the job that fills the blocks of ``restores``; nothing of them is saved any more."""
        copies = [self._take(restore) for restore in restores]

        def restore() -> None:
            began = time.monotonic()
            for block_ids, payload in copies:
                self._storage.write(block_ids, payload)
            self._measure(sum(len(block_ids) for block_ids, _ in copies), time.monotonic() - began)

        return restore

    def drop(self, sequence: Sequence) -> None:
        """Forget what is saved of a sequence that is over; nothing is fine."""
        saved = self._saved.pop(sequence, None)
        if saved is not None:
            self._free_bytes += len(saved.payload)

    def counters(self) -> dict[str, int]:
        """Return counts since the start; preemptions that are not among them were computed again."""
        return self._counters.copy()

    @property
    def _block_bytes(self) -> int:
        return self._storage.layout.block_bytes

    def _num_blocks(self, sequence: Sequence) -> int:
        return -(-sequence.num_computed_tokens // self._storage.layout.block_size)

    def _take(self, restore: Restore) -> tuple[tuple[BlockId, ...], memoryview]:
        saved = self._saved[restore.sequence]
        self.drop(restore.sequence)
        self._counters["swapped_in_blocks"] += saved.num_blocks - restore.first_block
        block_ids = tuple(restore.sequence.table.block_ids[restore.first_block : saved.num_blocks])
        return block_ids, memoryview(saved.payload)[restore.first_block * self._block_bytes :]

    def _measure(self, num_blocks: int, elapsed_s: float) -> None:
        if num_blocks and elapsed_s > 0:
            rate = num_blocks / elapsed_s
            self._blocks_per_s += _SMOOTHING * (rate - self._blocks_per_s) if self._blocks_per_s else rate

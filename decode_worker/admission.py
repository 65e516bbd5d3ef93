"""Who of the waiting sequences gets blocks: the most urgent first, as far as seats and blocks go.

A sequence takes its cached prefix and all blocks of its tokens at once. One that lacks blocks is passed by later ones,
but not for ever. Pure, as the scheduler is.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from decode_worker.slots import Slot, Slots, Stage
from decode_worker.step import Restore
from kvstore.block_pool import BlockPool
from kvstore.sequence import Sequence

MAX_BYPASS = 16
"""A waiting sequence that lacks blocks is passed by this many later ones at most; then all wait for it."""

MAX_LOOKAHEAD = 8
"""So many waiting sequences that lack blocks are looked past in one step."""


@dataclass(slots=True)
class Admitted:
    """Those that got blocks in one decision."""

    pulls: list[Slot] = field(default_factory=list)
    started: list[Slot] = field(default_factory=list)
    restored: list[Restore] = field(default_factory=list)


class Admission:
    """Lets slots in, ``max_num_seqs`` sequences at a time. Owned by a scheduler."""

    def __init__(self, slots: Slots, pool: BlockPool, max_num_seqs: int) -> None:
        self._slots = slots
        self._pool = pool
        self._max_num_seqs = max_num_seqs

    def admit(self) -> Admitted:
        """Give blocks to the waiting slots that fit, and let them run or be pulled."""
        admitted = Admitted()
        passed: list[Slot] = []
        num_running = self._num_seats_taken()
        if num_running >= self._max_num_seqs:
            return admitted
        for slot in self._slots.by_urgency(Stage.WAITING, Stage.OFFERED):
            if not self._has_seats(slot, num_running):
                break
            if not self._take_blocks(slot.sequence, num_running):
                passed.append(slot)
                if slot.num_bypassed >= MAX_BYPASS or len(passed) == MAX_LOOKAHEAD:
                    break
                continue
            num_running += slot.width
            for blocked in passed:
                blocked.num_bypassed += 1
            self._let_in(slot, admitted)
        return admitted

    @property
    def has_seats(self) -> bool:
        """Whether one more sequence may run, if there are blocks for it."""
        return self._num_seats_taken() < self._max_num_seqs

    def has_room(self, slot: Slot) -> bool:
        """Whether ``slot`` could run as things are, with what the cache holds of it."""
        num_running = self._num_seats_taken()
        if not self._has_seats(slot, num_running) or not self._take_blocks(slot.sequence, num_running):
            return False
        _put_back(slot.sequence)
        return True

    def would_fit(self, slot: Slot, victims: Iterable[Slot]) -> bool:
        """Whether ``slot`` could run if ``victims`` did not, even with nothing of it in the cache."""
        leaving = list(victims)
        num_running = self._num_seats_taken() - sum(victim.width for victim in leaving)
        block_ids = [block_id for victim in leaving for block_id in victim.sequence.table.block_ids]
        num_freed = sum(self._pool.ref_count(block_id) == 1 for block_id in block_ids)
        num_needed = slot.sequence.table.blocks_needed(slot.sequence.num_tokens) + num_running
        return self._has_seats(slot, num_running) and num_needed <= self._pool.num_available + num_freed

    def _num_seats_taken(self) -> int:
        return sum(slot.width for slot in self._slots.in_stages(Stage.RUNNING, Stage.PULLING))

    def _has_seats(self, slot: Slot, num_running: int) -> bool:
        return num_running + slot.width <= self._max_num_seqs

    def _take_blocks(self, sequence: Sequence, num_running: int) -> bool:
        """Give ``sequence`` its cached prefix and all blocks of its tokens; False, with nothing taken, if they lack.

        One block for each sequence that is running already is left free, so that a newcomer does not have to be
        preempted at once.
        """
        table = sequence.table
        sequence.adopt_prefix()
        if table.blocks_needed(sequence.num_tokens) + num_running > self._pool.num_available:
            _put_back(sequence)
            return False
        table.grow(sequence.num_tokens)
        return True

    def _let_in(self, slot: Slot, admitted: Admitted) -> None:
        slot.stop_waiting(self._slots.now)
        if slot.stage is Stage.OFFERED:
            slot.stage = Stage.PULLING
            admitted.pulls.append(slot)
            return
        slot.stage = Stage.RUNNING
        if slot.num_saved_tokens:
            admitted.restored.append(self._restore(slot))
        else:
            admitted.started.append(slot)

    def _restore(self, slot: Slot) -> Restore:
        sequence = slot.sequence
        first_block = sequence.num_computed_tokens // self._pool.block_size  # before it: still in the prefix cache
        sequence.num_computed_tokens, slot.num_saved_tokens = slot.num_saved_tokens, 0
        return Restore(sequence, first_block)


def _put_back(sequence: Sequence) -> None:
    sequence.table.release()
    sequence.num_computed_tokens = 0

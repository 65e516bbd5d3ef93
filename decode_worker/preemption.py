"""Who gives up blocks when the pool is full: the least urgent sequence, of equals the latest arrival.

Its blocks go back, and it is computed again later from its tokens (its full blocks stay in the prefix cache while
nobody needs them); or they are saved in host memory first, and restored. A waiting sequence whose request is more
urgent than others that run takes their place. Pure, as the scheduler is.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from decode_worker.admission import Admission
from decode_worker.slots import Slot, Slots, Stage
from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockCopy
from kvstore.sequence import Sequence


@dataclass(slots=True)
class Growth:
    """What it took to give each decoding sequence the block for its next token."""

    preempted: list[Slot] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


class Preemption:
    """Preempts slots; ``saves`` says whether one is to be saved. Owned by a scheduler.

    What it returns may end with one to be saved: then its blocks are not free yet, and nothing else can be decided.
    """

    def __init__(self, slots: Slots, pool: BlockPool, admission: Admission, saves: Callable[[Sequence], bool]) -> None:
        self._slots = slots
        self._pool = pool
        self._admission = admission
        self._saves = saves
        self.num_preemptions = 0
        """Since the start."""

    def preempt(self, slot: Slot) -> None:
        """Take the blocks of ``slot``, at once or when they are saved."""
        self.num_preemptions += 1
        if slot.sequence.num_remaining_tokens == 1 and self._saves(slot.sequence):
            slot.stage = Stage.SAVING
        else:
            slot.give_back(self._slots.now)

    def grow_running(self) -> Growth:
        """Let everything that runs have blocks for its tokens; the least urgent pays first."""
        growth = Growth()
        for slot in self._slots.by_urgency(Stage.RUNNING):
            if slot.is_parked:
                continue
            while slot.stage is Stage.RUNNING and not self._can_grow(slot.sequence):
                victim = self._slots.by_urgency(Stage.RUNNING)[-1]
                self.preempt(victim)
                growth.preempted.append(victim)
                if victim.stage is Stage.SAVING:
                    return growth
            if slot.stage is Stage.RUNNING:
                growth.copies += _own_blocks(slot.sequence)
        return growth

    @property
    def has_to_yield(self) -> bool:
        """Whether a waiting sequence may displace one that runs."""
        return bool(self._in_the_way())

    def yield_to_urgent(self) -> list[Slot]:
        """Preempt those whom the most urgent waiting sequence has to displace, if it may."""
        preempted: list[Slot] = []
        for victim in self._in_the_way():
            self.preempt(victim)
            preempted.append(victim)
            if victim.stage is Stage.SAVING:
                break
        return preempted

    def _in_the_way(self) -> list[Slot]:
        """Return whom the most urgent waiting slot has to displace; nobody if it may not, or it would not help."""
        urgent = min(self._slots.in_stages(Stage.WAITING, Stage.OFFERED), key=self._slots.urgency, default=None)
        if urgent is None:
            return []
        others = [slot for slot in self._slots.in_stages(Stage.RUNNING) if self._may_displace(urgent, slot)]
        if not others or self._admission.has_room(urgent):
            return []
        victims: list[Slot] = []
        for slot in sorted(others, key=self._slots.urgency, reverse=True):
            victims.append(slot)
            if self._admission.would_fit(urgent, victims):
                return victims
        return []

    def _may_displace(self, slot: Slot, other: Slot) -> bool:
        is_more_urgent = slot.sequence.sampling.priority < other.sequence.sampling.priority
        return is_more_urgent and self._slots.urgency(slot) < self._slots.urgency(other)

    def _can_grow(self, sequence: Sequence) -> bool:
        table = sequence.table
        num_copies = int(table.is_shared(sequence.num_computed_tokens))
        return table.blocks_needed(sequence.num_tokens) + num_copies <= self._pool.num_available


def saving(preempted: Iterable[Slot]) -> Slot | None:
    """Return the one that is to be saved, if one is."""
    return next((slot for slot in preempted if slot.stage is Stage.SAVING), None)


def _own_blocks(sequence: Sequence) -> list[BlockCopy]:
    """Let ``sequence`` have a block of its own for each token that is not computed; return the copies to make first."""
    table = sequence.table
    copy = table.copy_on_write(sequence.num_computed_tokens) if table.is_shared(sequence.num_computed_tokens) else None
    table.grow(sequence.num_tokens)
    return [] if copy is None else [copy]

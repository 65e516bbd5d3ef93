"""The sequences of a decode scheduler: the stage of each, and which of them go first.

Waiting makes more urgent: each ``ageing_s`` seconds count as one level of priority, and what was waited is kept; so one
that is passed by more urgent ones goes first in the end.

Pure: the time is told.
"""

import enum
from dataclasses import dataclass

from kvstore.sequence import Sequence


class Stage(enum.Enum):
    """Where a sequence is in this worker; changed by the scheduler, its admission and its preemption only."""

    HELD = enum.auto()  # without blocks; nobody has said yet who computes it, or it was parked
    EXPECTING = enum.auto()  # a prefill worker computes the prompt; its offer has not come
    WAITING = enum.auto()  # needs blocks, then is computed here
    OFFERED = enum.auto()  # needs blocks, then is pulled
    PULLING = enum.auto()  # has its blocks; bytes are on their way
    RUNNING = enum.auto()  # in every step from now on, unless parked
    SAVING = enum.auto()  # preempted; its blocks are copied to host memory, then given back
    RETIRED = enum.auto()  # finished, aborted or failed; not in the scheduler any more


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence in a scheduler."""

    sequence: Sequence
    arrival: int
    stage: Stage = Stage.HELD
    num_bypassed: int = 0
    waiting_since: float | None = None
    """When a step first found it waiting for room, if it does now."""
    waited_s: float = 0.0
    """How long it has waited for room before that."""
    is_gentle: bool = False
    """Its prompt is computed in few tokens a step beside answers."""
    num_saved_tokens: int = 0
    """Tokens whose KV is in host memory, while it waits."""

    @property
    def is_parked(self) -> bool:
        """Whether it has no token to compute; it keeps its blocks while nobody needs them."""
        return self.sequence.num_remaining_tokens == 0

    @property
    def width(self) -> int:
        """How many sequences run when it does: those that will fork from it in its stead."""
        return max(1, self.sequence.num_forks)

    def stop_waiting(self, now: float) -> None:
        """It has room now; what it waited is kept."""
        self.waited_s += now - (now if self.waiting_since is None else self.waiting_since)
        self.waiting_since = None

    def give_back(self, now: float) -> None:
        """Give its blocks to the pool; it waits for others, unless it has nothing to compute."""
        is_parked = self.is_parked
        self.sequence.table.release()
        self.sequence.num_computed_tokens = 0
        self.stage = Stage.HELD if is_parked else Stage.WAITING
        self.waiting_since = None if is_parked else now
        self.num_bypassed = 0


class Slots:
    """Owns the slots, in order of arrival, and knows when the present decision is made. Owned by a scheduler."""

    def __init__(self, ageing_s: float) -> None:
        self.now = 0.0
        """Of the present decision; monotonic seconds."""
        self._ageing_s = ageing_s
        self._slots: dict[Sequence, Slot] = {}
        self._num_arrived = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, sequence: Sequence) -> Slot:
        return self._slots[sequence]

    def get(self, sequence: Sequence) -> Slot | None:
        """Return the slot of ``sequence``, if it is here."""
        return self._slots.get(sequence)

    def is_running(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` is here and in every step."""
        slot = self._slots.get(sequence)
        return slot is not None and slot.stage is Stage.RUNNING

    def sequences(self) -> list[Sequence]:
        """Return every sequence, in order of arrival."""
        return list(self._slots)

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence."""
        self._num_arrived += 1
        self._slots[sequence] = Slot(sequence, self._num_arrived)

    def add_fork(self, parent: Slot, child: Sequence) -> None:
        """Take a sequence that has forked from ``parent``: it is where that is, and as urgent."""
        self._slots[child] = Slot(child, parent.arrival, parent.stage, waited_s=parent.waited_s)

    def remove(self, sequence: Sequence) -> None:
        """Forget ``sequence``; unknown is fine."""
        slot = self._slots.pop(sequence, None)
        if slot:
            slot.stage = Stage.RETIRED

    def begin_decision(self, now: float) -> None:
        """Decide at ``now`` from here on; who is found waiting for room has waited since then at the latest."""
        self.now = now
        for slot in self.in_stages(Stage.WAITING, Stage.OFFERED):
            if slot.waiting_since is None:
                slot.waiting_since = now

    def in_stages(self, *stages: Stage) -> list[Slot]:
        """Return the slots in one of ``stages``, in order of arrival."""
        return [slot for slot in self._slots.values() if slot.stage in stages]

    def by_urgency(self, *stages: Stage) -> list[Slot]:
        """Return the slots in one of ``stages``, the most urgent first."""
        return sorted(self.in_stages(*stages), key=self.urgency)

    def urgency(self, slot: Slot) -> tuple[int, int]:
        """Return what orders slots, the most urgent first."""
        waiting_s = 0.0 if slot.waiting_since is None else self.now - slot.waiting_since
        levels = int((slot.waited_s + waiting_s) / self._ageing_s)
        return slot.sequence.sampling.priority - levels, slot.arrival

"""Continuous batching: which sequences one step advances, and by how many tokens (Orca, section 3.1).

A step first takes one token of every decoding sequence, then fills what is left of a token budget with chunks of
prompts that this worker computes itself (Sarathi-Serve, section 4), then admits waiting sequences. A sequence takes a
block when it crosses a block boundary.

When the pool is full, the least urgent sequence, of equals the latest arrival, is preempted. Its blocks go back, and it
is computed again later from its tokens (its full blocks stay in the prefix cache while nobody needs them); or they are
saved in host memory first, and restored. A waiting sequence whose request is more urgent than others that run takes
their place. Waiting makes more urgent: each ``ageing_s`` seconds count as one level of priority, and what was waited is
kept; so one that is passed by more urgent ones goes first in the end.

Samples fork from their prompt and share its blocks; who writes into a shared one first gets a copy of it.

A sequence with no token left to compute is parked: it keeps its blocks while nobody needs them, and waits for its next
token (a beam waits for the other beams).

Pure: knows no clock, no model, no transfer and no host memory. What is in flight on the compute thread is the engine's
concern: blocks of a sequence that leaves are given to ``retire``, and the engine releases them when no running step can
write to them.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockCopy
from kvstore.sequence import Chunk, Sequence

MAX_BYPASS = 16
"""A waiting sequence that lacks blocks is passed by this many later ones at most; then all wait for it."""

MAX_LOOKAHEAD = 8
"""So many waiting sequences that lack blocks are looked past in one step."""


class Stage(enum.Enum):
    """Where a sequence is in this worker; changed by the scheduler only."""

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
    """A sequence in this scheduler."""

    sequence: Sequence
    arrival: int
    stage: Stage = Stage.HELD
    num_bypassed: int = 0
    waiting_since: float | None = None
    """When a step first found it waiting for room, if it does now."""
    waited_s: float = 0.0
    """How long it has waited for room before that."""
    num_saved_tokens: int = 0
    """Tokens whose KV is in host memory, while it waits."""


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


class DecodeScheduler:
    """Owns all sequences of a decode worker. ``saves`` says whether a sequence that is preempted is to be saved.

    ``max_num_seqs`` sequences run at a time. While any of them decodes, a step computes at most ``local_chunk_tokens``
    prompt tokens, so that its time, and with it everybody's inter-token latency, stays flat; else ``token_budget``.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        token_budget: int,
        local_chunk_tokens: int,
        ageing_s: float = 5.0,
        saves: Callable[[Sequence], bool] = lambda _: False,
    ) -> None:
        self._pool = pool
        self._ageing_s = ageing_s
        self._saves = saves
        self._now = 0.0
        self._max_num_seqs = max_num_seqs
        self._token_budget = token_budget
        self._local_chunk_tokens = local_chunk_tokens
        self._slots: dict[Sequence, Slot] = {}
        self._num_arrived = 0
        self._num_preemptions = 0

    # ---- what is here ----

    def stage(self, sequence: Sequence) -> Stage:
        """Return where ``sequence`` is; RETIRED when it is not here."""
        slot = self._slots.get(sequence)
        return slot.stage if slot else Stage.RETIRED

    def sequences(self) -> list[Sequence]:
        """Return every sequence here, in order of arrival."""
        return list(self._slots)

    @property
    def num_running(self) -> int:
        """Sequences in every step."""
        return len(self._in(Stage.RUNNING))

    @property
    def num_waiting(self) -> int:
        """Sequences accepted and not running."""
        return len(self._slots) - self.num_running

    def first_without_room(self) -> Sequence | None:
        """Return the most urgent sequence of those that only wait for room here."""
        return next((slot.sequence for slot in self._by_urgency(Stage.WAITING, Stage.OFFERED)), None)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that this worker itself has still to compute."""
        local = self._in(Stage.WAITING, Stage.RUNNING)
        computed = [slot.sequence for slot in local if not slot.num_saved_tokens]
        return sum(sequence.num_remaining_tokens for sequence in computed if sequence.num_remaining_tokens > 1)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._num_preemptions

    # ---- what happens to a sequence ----

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence; its table must be empty."""
        self._num_arrived += 1
        self._slots[sequence] = Slot(sequence, self._num_arrived)

    def expect(self, sequence: Sequence) -> None:
        """The prompt comes from a prefill worker; one that already has blocks or runs is left alone."""
        slot = self._slots[sequence]
        if slot.stage in (Stage.HELD, Stage.WAITING, Stage.OFFERED):
            slot.stage = Stage.EXPECTING

    def offered(self, sequence: Sequence) -> None:
        """The prefill worker can be pulled from."""
        slot = self._slots[sequence]
        if slot.stage is Stage.EXPECTING:
            slot.stage = Stage.OFFERED

    def compute_here(self, sequence: Sequence) -> None:
        """This worker computes the prompt; one that already has blocks or runs is left alone."""
        slot = self._slots[sequence]
        if slot.stage in (Stage.HELD, Stage.EXPECTING, Stage.OFFERED):
            slot.stage = Stage.WAITING

    def pulled(self, sequence: Sequence, num_tokens: int) -> None:
        """The pull has ended with ``num_tokens`` valid leading tokens; what is missing is computed here.

        The last token's KV does not count while somebody waits for the token after it: its logits are needed.
        """
        slot = self._slots[sequence]
        if slot.stage is Stage.PULLING:
            most = sequence.num_tokens - 1 if sequence.sample_indices else sequence.num_tokens
            sequence.num_computed_tokens = 0 if sequence.wants_prompt_logprobs else min(num_tokens, most)
            sequence.table.publish(sequence.token_ids, sequence.num_computed_tokens)
            slot.stage = Stage.RUNNING

    def computed(self, chunk: Chunk) -> None:
        """Record that ``chunk`` was computed, and publish the blocks that it filled."""
        sequence = chunk.sequence
        sequence.num_computed_tokens += chunk.num_scheduled_tokens
        sequence.table.publish(sequence.token_ids, sequence.num_computed_tokens)

    def fork(self, parent: Sequence, children: Iterable[Sequence]) -> None:
        """Let ``children``, which begin with the tokens of the parked ``parent``, go on from it; it stays itself."""
        slot = self._slots[parent]
        for child in children:
            child.table = parent.table.fork()
            child.num_computed_tokens = parent.num_computed_tokens
            self._slots[child] = Slot(child, slot.arrival, slot.stage, waited_s=slot.waited_s)

    def saved(self, sequence: Sequence) -> None:
        """The blocks of a sequence that is preempted are in host memory: they go back to the pool."""
        slot = self._slots.get(sequence)
        if slot is not None and slot.stage is Stage.SAVING:
            num_saved_tokens = sequence.num_computed_tokens
            self._give_back(slot)
            slot.num_saved_tokens = num_saved_tokens

    def retire(self, sequence: Sequence) -> None:
        """Forget ``sequence``; unknown is fine. Its blocks are left to the caller."""
        slot = self._slots.pop(sequence, None)
        if slot:
            slot.stage = Stage.RETIRED

    # ---- the decision ----

    def schedule(self, now: float) -> DecodeStep:
        """Decide one step at ``now`` (monotonic seconds): grow what decodes, let in who is more urgent (preempting for
        both if need be), chunk what prefills, admit what fits.

        Where only the blocks of parked sequences keep all others from going on, the parked ones give them back.
        """
        self._now = now
        for slot in self._in(Stage.WAITING, Stage.OFFERED):
            if slot.waiting_since is None:
                slot.waiting_since = now
        step = self._decide()
        while step.is_idle and self._in(Stage.WAITING, Stage.OFFERED) and (parked := self._parked()):
            self._preempt(parked[-1])
            step = self._decide()
        return step

    def _decide(self) -> DecodeStep:
        preempted, copies = self._grow_decoding()
        if not _saving(preempted):
            preempted += self._yield_to_urgent()
        if saving := _saving(preempted):
            return DecodeStep((), (), (), tuple(preempted), tuple(copies), saving=saving)
        pulls, started, restored = self._admit()
        return DecodeStep(
            self._chunks(), tuple(pulls), tuple(started), tuple(preempted), tuple(copies), tuple(restored)
        )

    def _chunks(self) -> tuple[Chunk, ...]:
        running = self._in(Stage.RUNNING)
        decoding = [slot for slot in running if slot.sequence.num_remaining_tokens == 1]
        chunks = [Chunk(slot.sequence, 1) for slot in decoding]
        budget = self._local_chunk_tokens if decoding else self._token_budget
        for slot in running:
            remaining = slot.sequence.num_remaining_tokens
            if remaining > 1 and budget > 0:
                chunks.append(Chunk(slot.sequence, min(budget, remaining, slot.sequence.max_chunk_tokens)))
                budget -= chunks[-1].num_scheduled_tokens
        return tuple(chunks)

    # ---- who goes first ----

    def _parked(self) -> list[Slot]:
        return [slot for slot in self._by_urgency(Stage.RUNNING) if slot.sequence.num_remaining_tokens == 0]

    def _in(self, *stages: Stage) -> list[Slot]:
        return [slot for slot in self._slots.values() if slot.stage in stages]

    def _by_urgency(self, *stages: Stage) -> list[Slot]:
        return sorted(self._in(*stages), key=self._urgency)

    def _urgency(self, slot: Slot) -> tuple[int, int]:
        """Return what orders sequences, the most urgent first."""
        waiting_s = 0.0 if slot.waiting_since is None else self._now - slot.waiting_since
        levels = int((slot.waited_s + waiting_s) / self._ageing_s)
        return slot.sequence.sampling.priority - levels, slot.arrival

    # ---- preemption ----

    def _grow_decoding(self) -> tuple[list[Slot], list[BlockCopy]]:
        preempted: list[Slot] = []
        copies: list[BlockCopy] = []
        for slot in self._by_urgency(Stage.RUNNING):  # the least urgent pays first
            if slot.sequence.num_remaining_tokens == 0:
                continue
            while slot.stage is Stage.RUNNING and not self._can_grow(slot.sequence):
                victim = self._by_urgency(Stage.RUNNING)[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim.stage is Stage.SAVING:
                    return preempted, copies
            if slot.stage is Stage.RUNNING:
                copies += _own_blocks(slot.sequence)
        return preempted, copies

    def _yield_to_urgent(self) -> list[Slot]:
        """Preempt those whom the most urgent waiting sequence has to displace, if it may."""
        urgent = min(self._in(Stage.WAITING, Stage.OFFERED), key=self._urgency, default=None)
        if urgent is None:
            return []
        others = [slot for slot in self._in(Stage.RUNNING) if self._may_displace(urgent, slot)]
        if not others or self._has_room(urgent):
            return []
        victims: list[Slot] = []
        for slot in sorted(others, key=self._urgency, reverse=True):
            victims.append(slot)
            if self._fits(urgent, victims):
                break
        if not self._fits(urgent, victims):
            return []
        preempted: list[Slot] = []
        for victim in victims:
            self._preempt(victim)
            preempted.append(victim)
            if victim.stage is Stage.SAVING:
                break
        return preempted

    def _may_displace(self, slot: Slot, other: Slot) -> bool:
        is_more_urgent = slot.sequence.sampling.priority < other.sequence.sampling.priority
        return is_more_urgent and self._urgency(slot) < self._urgency(other)

    def _has_room(self, slot: Slot) -> bool:
        num_running = self._num_seats_taken()
        if not self._has_seats(slot.sequence, num_running) or not self._take_blocks(slot.sequence, num_running):
            return False
        slot.sequence.table.release()
        slot.sequence.num_computed_tokens = 0
        return True

    def _fits(self, slot: Slot, victims: Iterable[Slot]) -> bool:
        """Whether ``slot`` could run if ``victims`` did not, even with nothing of it in the cache."""
        leaving = [victim.sequence for victim in victims]
        num_running = self._num_seats_taken() - sum(map(_width, leaving))
        block_ids = [block_id for sequence in leaving for block_id in sequence.table.block_ids]
        num_freed = sum(self._pool.ref_count(block_id) == 1 for block_id in block_ids)
        num_needed = slot.sequence.table.blocks_needed(slot.sequence.num_tokens) + num_running
        return self._has_seats(slot.sequence, num_running) and num_needed <= self._pool.num_available + num_freed

    def _num_seats_taken(self) -> int:
        return sum(_width(slot.sequence) for slot in self._in(Stage.RUNNING, Stage.PULLING))

    def _has_seats(self, sequence: Sequence, num_running: int) -> bool:
        return num_running + _width(sequence) <= self._max_num_seqs

    def _can_grow(self, sequence: Sequence) -> bool:
        table = sequence.table
        num_copies = int(table.is_shared(sequence.num_computed_tokens))
        return table.blocks_needed(sequence.num_tokens) + num_copies <= self._pool.num_available

    def _preempt(self, slot: Slot) -> None:
        self._num_preemptions += 1
        if slot.sequence.num_remaining_tokens == 1 and self._saves(slot.sequence):
            slot.stage = Stage.SAVING
        else:
            self._give_back(slot)

    def _give_back(self, slot: Slot) -> None:
        is_parked = slot.sequence.num_remaining_tokens == 0
        slot.sequence.table.release()
        slot.sequence.num_computed_tokens = 0
        slot.stage = Stage.HELD if is_parked else Stage.WAITING
        slot.waiting_since = None if is_parked else self._now
        slot.num_bypassed = 0

    # ---- admission ----

    def _admit(self) -> tuple[list[Slot], list[Slot], list[Restore]]:
        pulls: list[Slot] = []
        started: list[Slot] = []
        restored: list[Restore] = []
        passed: list[Slot] = []
        num_running = self._num_seats_taken()
        if num_running >= self._max_num_seqs:
            return pulls, started, restored
        for slot in self._by_urgency(Stage.WAITING, Stage.OFFERED):
            if not self._has_seats(slot.sequence, num_running):
                break
            if not self._take_blocks(slot.sequence, num_running):
                passed.append(slot)
                if slot.num_bypassed >= MAX_BYPASS or len(passed) == MAX_LOOKAHEAD:
                    break
                continue
            num_running += _width(slot.sequence)
            for blocked in passed:
                blocked.num_bypassed += 1
            self._stop_waiting(slot)
            if slot.stage is Stage.OFFERED:
                slot.stage = Stage.PULLING
                pulls.append(slot)
                continue
            slot.stage = Stage.RUNNING
            if slot.num_saved_tokens:
                restored.append(self._restore(slot))
            else:
                started.append(slot)
        return pulls, started, restored

    def _stop_waiting(self, slot: Slot) -> None:
        slot.waited_s += self._now - (self._now if slot.waiting_since is None else slot.waiting_since)
        slot.waiting_since = None

    def _restore(self, slot: Slot) -> Restore:
        sequence = slot.sequence
        first_block = sequence.num_computed_tokens // self._pool.block_size  # before it: still in the prefix cache
        sequence.num_computed_tokens, slot.num_saved_tokens = slot.num_saved_tokens, 0
        return Restore(sequence, first_block)

    def _take_blocks(self, sequence: Sequence, num_running: int) -> bool:
        """Give ``sequence`` its cached prefix and all blocks of its tokens; False, with nothing taken, if they lack.

        One block for each sequence that is running already is left free, so that a newcomer does not have to be
        preempted at once.
        """
        table = sequence.table
        sequence.adopt_prefix()
        if table.blocks_needed(sequence.num_tokens) + num_running > self._pool.num_available:
            table.release()
            sequence.num_computed_tokens = 0
            return False
        table.grow(sequence.num_tokens)
        return True


def _width(sequence: Sequence) -> int:
    """Return how many sequences run when ``sequence`` does, those that will fork from it in its stead."""
    return max(1, sequence.num_forks)


def _own_blocks(sequence: Sequence) -> list[BlockCopy]:
    """Let ``sequence`` have a block of its own for each token that is not computed; return the copies to make first."""
    table = sequence.table
    copy = table.copy_on_write(sequence.num_computed_tokens) if table.is_shared(sequence.num_computed_tokens) else None
    table.grow(sequence.num_tokens)
    return [] if copy is None else [copy]


def _saving(preempted: Iterable[Slot]) -> Slot | None:
    return next((slot for slot in preempted if slot.stage is Stage.SAVING), None)

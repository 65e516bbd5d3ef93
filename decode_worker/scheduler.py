"""Continuous batching: which sequences one step advances, and by how many tokens (Orca, section 3.1).

A step first takes one token of every decoding sequence, then fills what is left of a token budget with chunks of
prompts that this worker computes itself (Sarathi-Serve, section 4), then admits waiting sequences. A sequence takes a
block when it crosses a block boundary.

Who goes first is said by :mod:`decode_worker.slots`, who gets blocks by :mod:`decode_worker.admission`, and who has to
give them up when the pool is full by :mod:`decode_worker.preemption`.

Samples fork from their prompt and share its blocks; who writes into a shared one first gets a copy of it.

A sequence with no token left to compute is parked: it keeps its blocks while nobody needs them, and waits for its next
token (a beam waits for the other beams).

Pure: knows no clock, no model, no transfer and no host memory. What is in flight on the compute thread is the engine's
concern: blocks of a sequence that leaves are given to ``retire``, and the engine releases them when no running step can
write to them.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from decode_worker.admission import Admission
from decode_worker.gentle_budget import GentleBudget
from decode_worker.look_ahead import LookAhead
from decode_worker.preemption import Preemption, saving
from decode_worker.slots import Slot, Slots, Stage
from decode_worker.step import DecodeStep
from kvstore.block_pool import BlockPool
from kvstore.sequence import Chunk, Sequence


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
        self._token_budget = token_budget
        self._local_chunk_tokens = local_chunk_tokens
        self._slots = Slots(ageing_s)
        self._admission = Admission(self._slots, pool, max_num_seqs)
        self._preemption = Preemption(self._slots, pool, self._admission, saves)
        self._look_ahead = LookAhead(self._slots, pool, self._admission, self._preemption)

    # ---- what is here ----

    def stage(self, sequence: Sequence) -> Stage:
        """Return where ``sequence`` is; RETIRED when it is not here."""
        slot = self._slots.get(sequence)
        return slot.stage if slot else Stage.RETIRED

    def sequences(self) -> list[Sequence]:
        """Return every sequence here, in order of arrival."""
        return self._slots.sequences()

    @property
    def num_running(self) -> int:
        """Sequences in every step."""
        return len(self._slots.in_stages(Stage.RUNNING))

    @property
    def num_waiting(self) -> int:
        """Sequences accepted and not running."""
        return len(self._slots) - self.num_running

    def first_without_room(self) -> Sequence | None:
        """Return the most urgent sequence of those that only wait for room here."""
        return next((slot.sequence for slot in self._slots.by_urgency(Stage.WAITING, Stage.OFFERED)), None)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that this worker itself has still to compute."""
        local = self._slots.in_stages(Stage.WAITING, Stage.RUNNING)
        computed = [slot.sequence for slot in local if not slot.num_saved_tokens]
        return sum(sequence.num_remaining_tokens for sequence in computed if sequence.num_remaining_tokens > 1)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._preemption.num_preemptions

    # ---- what happens to a sequence ----

    def add(self, sequence: Sequence) -> None:
        """Take a new sequence; its table must be empty."""
        self._slots.add(sequence)

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

    def compute_here(self, sequence: Sequence, *, gently: bool = False) -> None:
        """This worker computes the prompt; one that already has blocks or runs is left alone.

        ``gently``: in so few tokens a step that answers beside it do not slow down.
        """
        slot = self._slots[sequence]
        if slot.stage in (Stage.HELD, Stage.EXPECTING, Stage.OFFERED):
            slot.stage = Stage.WAITING
            slot.is_gentle = gently

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
            self._slots.add_fork(slot, child)

    def saved(self, sequence: Sequence) -> None:
        """The blocks of a sequence that is preempted are in host memory: they go back to the pool."""
        slot = self._slots.get(sequence)
        if slot is not None and slot.stage is Stage.SAVING:
            num_saved_tokens = sequence.num_computed_tokens
            slot.give_back(self._slots.now)
            slot.num_saved_tokens = num_saved_tokens

    def retire(self, sequence: Sequence) -> None:
        """Forget ``sequence``; unknown is fine. Its blocks are left to the caller."""
        self._slots.remove(sequence)

    # ---- the decision ----

    def schedule(self, now: float) -> DecodeStep:
        """Decide one step at ``now`` (monotonic seconds): grow what decodes, let in who is more urgent (preempting for
        both if need be), chunk what prefills, admit what fits.

        Where only the blocks of parked sequences keep all others from going on, the parked ones give them back.
        """
        self._slots.begin_decision(now)
        step = self._decide()
        while step.is_idle and self._slots.in_stages(Stage.WAITING, Stage.OFFERED) and (parked := self._parked()):
            self._preemption.preempt(parked[-1])
            step = self._decide()
        return step

    def schedule_behind(self, chunks: Seq[Chunk], now: float) -> tuple[Chunk, ...]:
        """Decide at ``now``, while ``chunks`` are being computed, the step behind them; nothing where it depends on
        their results. See :mod:`decode_worker.look_ahead`.
        """
        self._slots.begin_decision(now)
        return self._look_ahead.chunks_behind(chunks)

    def _decide(self) -> DecodeStep:
        growth = self._preemption.grow_running()
        preempted, copies = growth.preempted, tuple(growth.copies)
        if not saving(preempted):
            preempted += self._preemption.yield_to_urgent()
        if slot := saving(preempted):
            return DecodeStep((), (), (), tuple(preempted), copies, saving=slot)
        admitted = self._admission.admit()
        return DecodeStep(
            self._chunks(),
            tuple(admitted.pulls),
            tuple(admitted.started),
            tuple(preempted),
            copies,
            tuple(admitted.restored),
        )

    def _parked(self) -> list[Slot]:
        return [slot for slot in self._slots.by_urgency(Stage.RUNNING) if slot.is_parked]

    def _chunks(self) -> tuple[Chunk, ...]:
        running = self._slots.in_stages(Stage.RUNNING)
        decoding = [slot for slot in running if slot.sequence.num_remaining_tokens == 1]
        chunks = [Chunk(slot.sequence, 1) for slot in decoding]
        budget = self._local_chunk_tokens if decoding else self._token_budget
        gentle = GentleBudget()
        for slot in running:
            sequence = slot.sequence
            num_tokens = min(budget, sequence.num_remaining_tokens, sequence.max_chunk_tokens)
            if sequence.num_remaining_tokens == 1 or num_tokens == 0:
                continue
            if slot.is_gentle and decoding:
                num_tokens = gentle.take(sequence.num_computed_tokens, num_tokens)
            if num_tokens:
                chunks.append(Chunk(sequence, num_tokens))
                budget -= num_tokens
        return tuple(chunks)

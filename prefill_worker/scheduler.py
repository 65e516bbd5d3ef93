"""Chunked prefill: which tokens of which prompts one step computes.

Prompts are taken in order of arrival and cut into chunks under a token budget; what is left of the budget goes to the
next prompt, so short ones are packed into one step (Sarathi-Serve, section 4). A prompt is admitted with its first
chunk and gets all its blocks then, so admitted prompts never wait for each other. One that does not fit may be passed
by later ones, a bounded number of times. A prompt whose prefix an admitted one is computing waits for it instead of
computing it twice.

Pure: knows no clock, no model and no transfer. A finished sequence keeps its table; the lease's owner releases it.
"""

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from common.ids import BlockHash
from kvstore.block_pool import BlockPool
from kvstore.sequence import Chunk, Sequence

MAX_BYPASS = 16
"""A waiting prompt that lacks blocks is passed by this many later ones at most; then all wait for it."""

MAX_LOOKAHEAD = 8
"""So many waiting prompts that lack blocks are looked past in one step."""


@dataclass(slots=True, eq=False)
class _Waiting:
    sequence: Sequence
    num_bypassed: int = 0


@dataclass(slots=True, eq=False)
class _Admitted:
    sequence: Sequence
    computing: Seq[BlockHash]  # hashes of the full blocks that it was admitted to compute


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """One decision: ``chunks`` are computed together; ``admitted`` got their blocks just now and have their first."""

    chunks: tuple[Chunk, ...]
    admitted: tuple[Sequence, ...]


class PrefillScheduler:
    """Owns the waiting and the admitted prompts.

    A step computes at most ``token_budget`` tokens; at most ``max_num_seqs`` prompts are admitted at a time.
    """

    def __init__(self, pool: BlockPool, *, token_budget: int, max_num_seqs: int) -> None:
        self._pool = pool
        self._token_budget = token_budget
        self._max_num_seqs = max_num_seqs
        self._waiting: list[_Waiting] = []
        self._admitted: list[_Admitted] = []
        self._computing: Counter[BlockHash] = Counter()

    @property
    def num_waiting(self) -> int:
        """Prompts without blocks."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Prompts that are being computed."""
        return len(self._admitted)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed, by what is cached now."""
        waiting = [item.sequence for item in self._waiting]
        admitted = sum(item.sequence.num_remaining_tokens for item in self._admitted)
        return admitted + sum(one.num_tokens - one.table.cached_prefix(one.token_ids) for one in waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt; its table must be empty."""
        self._waiting.append(_Waiting(sequence))

    def remove(self, sequence: Sequence) -> None:
        """Forget a prompt in whatever state; unknown is fine. Its blocks are left to the caller."""
        self._waiting = [item for item in self._waiting if item.sequence is not sequence]
        for item in self._admitted:
            if item.sequence is sequence:
                self._computing.subtract(item.computing)
                self._computing = +self._computing
        self._admitted = [item for item in self._admitted if item.sequence is not sequence]

    def schedule(self) -> PrefillStep:
        """Cut the next chunks of what is admitted, then admit what fits into the rest of the budget.

        So a prompt takes blocks only when its first chunk is computed, and has a chunk in every step from then on.
        """
        chunks: list[Chunk] = []
        budget = self._token_budget
        for item in self._admitted:
            budget = _cut(item.sequence, budget, chunks)
        admitted = self._admit(budget, chunks)
        return PrefillStep(tuple(chunks), tuple(admitted))

    def computed(self, chunk: Chunk) -> None:
        """Record that ``chunk`` was computed: publish its full blocks; a finished prompt leaves the scheduler."""
        sequence = chunk.sequence
        sequence.num_computed_tokens += chunk.num_scheduled_tokens
        sequence.table.publish(sequence.token_ids, sequence.num_computed_tokens)
        if sequence.num_remaining_tokens == 0:
            self.remove(sequence)

    def _admit(self, budget: int, chunks: list[Chunk]) -> list[Sequence]:
        admitted: list[Sequence] = []
        passed: list[_Waiting] = []
        for item in list(self._waiting):
            if budget == 0 or len(self._admitted) >= self._max_num_seqs:
                break
            if self._prefix_is_being_computed(item.sequence):
                continue
            if self._take_blocks(item.sequence):
                self._waiting.remove(item)
                admitted.append(item.sequence)
                budget = _cut(item.sequence, budget, chunks)
                for blocked in passed:
                    blocked.num_bypassed += 1
            else:
                passed.append(item)
                if item.num_bypassed >= MAX_BYPASS or len(passed) == MAX_LOOKAHEAD:
                    break
        return admitted

    def _prefix_is_being_computed(self, sequence: Sequence) -> bool:
        hashes = sequence.table.block_hashes(sequence.token_ids)
        num_cached = self._pool.match(hashes)
        return num_cached < len(hashes) and self._computing[hashes[num_cached]] > 0

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Give ``sequence`` its cached prefix and all further blocks; False, with nothing taken, if they lack."""
        table = sequence.table
        sequence.adopt_prefix()
        if table.blocks_needed(sequence.num_tokens) > self._pool.num_available:
            table.release()
            sequence.num_computed_tokens = 0
            return False
        table.grow(sequence.num_tokens)
        num_cached_blocks = sequence.num_computed_tokens // self._pool.block_size
        computing = table.block_hashes(sequence.token_ids)[num_cached_blocks:]
        self._admitted.append(_Admitted(sequence, computing))
        self._computing.update(computing)
        return True


def _cut(sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
    """Append the next chunk of ``sequence`` to ``chunks``, if the budget allows one; return what is left of it."""
    num_tokens = min(budget, sequence.num_remaining_tokens, sequence.max_chunk_tokens)
    if num_tokens:
        chunks.append(Chunk(sequence, num_tokens))
    return budget - num_tokens

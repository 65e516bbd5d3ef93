"""The step behind one that still runs, decided before the tokens of that one are known.

It can be told when nothing but the tokens themselves is open: when the same sequences go on, each with the token that
is being sampled. One that turns out to have ended has a token computed too many, which is dropped. Whatever else there
is to decide (who comes, who is preempted, which blocks are copied, which beams go on) waits for the results.

Pure, as the scheduler is.
"""

from collections.abc import Sequence as Seq

from decode_worker.admission import Admission
from decode_worker.preemption import Preemption
from decode_worker.slots import Slots, Stage
from kvstore.block_pool import BlockPool
from kvstore.sequence import Chunk, Sequence


class LookAhead:
    """Owned by a scheduler."""

    def __init__(self, slots: Slots, pool: BlockPool, admission: Admission, preemption: Preemption) -> None:
        self._slots = slots
        self._pool = pool
        self._admission = admission
        self._preemption = preemption

    def chunks_behind(self, chunks: Seq[Chunk]) -> tuple[Chunk, ...]:
        """Return what follows while ``chunks`` are computed, with blocks taken for it; nothing when it is not sure."""
        here = [chunk for chunk in chunks if self._slots.is_running(chunk.sequence)]
        if not all(_goes_on_alone(chunk) for chunk in here) or self._others_may_run(len(here)):
            return ()
        sequences = [chunk.sequence for chunk in here if not _ends_surely(chunk.sequence)]
        if not self._take_blocks(sequences):
            return ()
        return tuple(Chunk(sequence, 1) for sequence in sequences)

    def _others_may_run(self, num_here: int) -> bool:
        """Whether a sequence that is not in the running step could be in the next one."""
        if len(self._slots.in_stages(Stage.RUNNING)) > num_here:
            return True
        waits = bool(self._slots.in_stages(Stage.WAITING, Stage.OFFERED))
        return waits and (self._admission.has_seats or self._preemption.has_to_yield)

    def _take_blocks(self, sequences: Seq[Sequence]) -> bool:
        """Give each a slot for the token that is being sampled; False, with nothing taken, if not all can have one."""
        tables = [(sequence.table, sequence.num_tokens) for sequence in sequences]
        num_needed = sum(table.blocks_needed(position + 1) for table, position in tables)
        if num_needed > self._pool.num_available or any(table.is_shared(position) for table, position in tables):
            return False
        for table, position in tables:
            table.grow(position + 1)
        return True


def _goes_on_alone(chunk: Chunk) -> bool:
    """Whether a chunk gives its sequence one next token, and nothing that others wait for."""
    sequence = chunk.sequence
    is_search = sequence.sampling.beam is not None
    return chunk.samples and not is_search and not sequence.num_forks and len(sequence.sample_indices) == 1


def _ends_surely(sequence: Sequence) -> bool:
    """Whether the token that is being sampled is the last one, whatever it is."""
    return sequence.num_output_tokens + 1 >= sequence.sampling.max_tokens

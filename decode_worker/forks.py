"""When a prompt is computed its samples fork from it; and with every step the beams of a search fork from each other.

A fork shares all blocks of its parent. The roster, which owns the sequences, is told who begins and who ends.
"""

from collections.abc import Callable, Collection

from decode_worker.beam_search import Hypothesis
from decode_worker.beams import Beams, Branch
from decode_worker.request import Request
from decode_worker.roster import Roster
from decode_worker.scheduler import DecodeScheduler
from decode_worker.slots import Stage
from kvstore.block_table import BlockTable
from kvstore.sequence import Sequence


class Forks:
    """``new_table`` returns an empty block table for a cache salt."""

    def __init__(self, scheduler: DecodeScheduler, roster: Roster, new_table: Callable[[str], BlockTable]) -> None:
        self.num_forks = 0
        """Sequences that forked since the start."""
        self._scheduler = scheduler
        self._roster = roster
        self._new_table = new_table

    def fork_samples(self, request: Request) -> None:
        """Let the samples go on from their prompt if that has just been computed; it ends with it."""
        prompt = request.sequence
        if request.beams is not None or request.has_forked or not prompt.num_forks or prompt.num_remaining_tokens:
            return
        self._fork(request, prompt, request.samples.values())
        request.has_forked = True
        self._roster.drop(prompt)

    def advance_beams(self, request: Request) -> list[Hypothesis]:
        """When all beams of a request have been computed, let those go on that the search has chosen.

        Return the best answers when it is over.
        """
        beams = request.beams
        if request.gone or beams is None or not beams.can_advance or self._is_being_computed(request.sequence):
            return []
        if not request.has_forked:
            request.has_forked = True
            request.report_prompt()
            request.report_begin()
        branches = beams.advance()
        if not branches:
            return beams.best(len(request.samples))
        self._go_on(request, beams, branches)
        return []

    def _go_on(self, request: Request, beams: Beams, branches: list[Branch]) -> None:
        sequences = [self._sequence(request, branch) for branch in branches]
        for sequence in beams.sequences:
            if sequence not in sequences:
                self._roster.drop(sequence)
        for sequence, branch in zip(sequences, branches, strict=True):
            sequence.token_ids.append(branch.token_id)
            self._scheduler.compute_here(sequence)  # if it had to give its blocks back
        beams.sequences = sequences

    def _sequence(self, request: Request, branch: Branch) -> Sequence:
        """Return the sequence for a beam of the next step, its new token not in it yet."""
        parent = branch.parent
        if branch.is_first:
            parent.sample_indices, parent.num_forks = (0,), 0
            return parent
        child = parent.copy(self._new_table(request.cache_salt))
        self._fork(request, parent, (child,))
        return child

    def _fork(self, request: Request, parent: Sequence, children: Collection[Sequence]) -> None:
        self._scheduler.fork(parent, children)
        self._roster.adopt(request, children)
        self.num_forks += len(children)

    def _is_being_computed(self, prompt: Sequence) -> bool:
        """Whether the KV of a prompt, whose next tokens may be known, is still being pulled or computed."""
        stage = self._scheduler.stage(prompt)
        return stage is Stage.PULLING or (stage is Stage.RUNNING and prompt.num_remaining_tokens > 0)

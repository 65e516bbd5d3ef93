"""What is written: the tokens of samples and beams as they come, and the end of a sample or of all.

A request ends when all its samples have finished, when they are aborted, or when it fails. Then its blocks are given
back; those that a pull may still write to, when that has ended.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from common.errors import BatonError
from common.messages import SampledToken
from decode_worker.forks import Forks
from decode_worker.request import Request
from decode_worker.roster import Roster
from decode_worker.transfers import Transfers
from kvstore.sequence import Sequence


class Answers:
    """Gives requests their next tokens, and ends them."""

    def __init__(self, roster: Roster, forks: Forks, transfers: Transfers) -> None:
        self._roster = roster
        self._forks = forks
        self._transfers = transfers
        self._num_tokens = 0

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return {"generation_tokens": self._num_tokens, "forks": self._forks.num_forks}

    # ---- tokens ----

    def computed(self, request: Request, sequence: Sequence, tokens: Seq[SampledToken]) -> None:
        """A step has computed a chunk of ``sequence``, and sampled ``tokens`` if that was its last one."""
        self._forks.fork_samples(request)
        self.take(request, sequence, tokens)
        self._advance_beams(request)

    def pulled(self, request: Request) -> None:
        """The prompt's KV has been pulled; its next tokens came before that."""
        self._forks.fork_samples(request)
        self._advance_beams(request)

    def take(self, request: Request, sequence: Sequence, tokens: Seq[SampledToken]) -> None:
        """Take the next tokens after ``sequence``."""
        if request.beams is None:
            self._append(request, tokens, sequence.num_tokens)
        elif tokens and tokens[0].logprobs is not None:
            request.beams.candidates[sequence] = tokens[0].logprobs

    def _append(self, request: Request, tokens: Iterable[SampledToken], num_tokens: int) -> None:
        request.report_prompt()
        for token in tokens:
            sequence = request.samples.get(token.sample_index)
            if sequence is not None and sequence.num_tokens == num_tokens:  # else it has the token already
                self._num_tokens += 1
                if request.append(sequence, token) is not None:
                    self.end_sample(request, token.sample_index, finished=True)

    def _advance_beams(self, request: Request) -> None:
        answers = self._forks.advance_beams(request)
        if answers:
            self._num_tokens += sum(len(answer.output_ids) for answer in answers)
            request.report_answers(answers)
            self.leave(request, finished=True)

    # ---- ends ----

    def fail(self, sequence: Sequence, error: BatonError) -> None:
        """Give up the request of ``sequence``; one that is not here any more is fine."""
        request = self._roster.find_owner(sequence)
        if request is not None:
            self.give_up(request, error)

    def give_up(self, request: Request, error: BatonError) -> None:
        """End a request that cannot go on here, and say why."""
        if not request.gone:
            request.report_failure(error)
            self.leave(request)

    def end_sample(self, request: Request, index: int, *, finished: bool = False) -> None:
        """One sample is over; with the last one the request is."""
        if len(request.samples) == 1:
            self.leave(request, finished=finished)
            return
        sequence = request.samples.pop(index)
        if self._roster.find_owner(sequence) is not None:
            self._roster.drop(sequence)

    def leave(self, request: Request, *, finished: bool = False) -> None:
        """All samples are over; give their blocks back, now or when nothing can write to them any more."""
        if request.gone:
            return
        self._roster.retire(request)
        if request.pull is None:
            self._transfers.withdraw(request, "not wanted any more")
            self._roster.release(request)
            return
        if not finished and request.offer is not None:  # a finished one ends by itself with the last token
            self._transfers.stop(request)
            request.quarantined = request.sequence.table.quarantine()
        self._transfers.forget(request)

"""An accepted prompt of a decode worker with its samples, and what its gateway is told of them."""

import asyncio
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from common.errors import BatonError, to_detail
from common.grammar import Grammar
from common.ids import BlockId, RequestId, TransferId
from common.messages import Offer, Plan, PromptLogprobs, SampledToken, SequenceOutput, Started, Submit
from common.sampling import FinishReason, finish_reason
from decode_worker.beam_search import Hypothesis
from decode_worker.beams import Beams
from decode_worker.outbox import Outbox
from kvstore.block_table import BlockTable
from kvstore.sequence import Sequence


@dataclass(slots=True, eq=False)
class Request:
    """One accepted prompt with its samples, and where their tokens go. Owned by the roster."""

    request_id: RequestId
    sequence: Sequence
    """What is pulled or computed first: the only sample, or the prompt that several fork from."""
    samples: dict[int, Sequence]
    """The samples that are not over, by their indices."""
    outbox: Outbox
    beams: Beams | None = None
    """If it is a beam search; then ``samples`` only say how many answers are wanted."""
    transfer_id: TransferId | None = None
    offer: Offer | None = None
    pull: asyncio.Task[None] | None = None
    plan: Plan | None = None
    """The plan that holds."""
    cache_salt: str = ""
    is_replay: bool = False
    """Its cache hits are counted already."""
    fetched_tokens: int = 0
    """Tokens of the prefix that were just pulled from a peer."""
    ready_at: float | None = None
    """When it lacked nothing but room to begin; monotonic seconds."""
    started: bool = False
    has_forked: bool = False
    """Its prompt is computed, and its samples or beams go on by themselves."""
    prompt_reported: bool = False
    """Its prompt's log probabilities were sent."""
    gone: bool = False
    """Finished, aborted or failed; only its blocks are still waited for."""
    quarantined: list[BlockId] = field(default_factory=list)
    """Blocks that a stopped pull may still write to."""

    @property
    def wants_kv(self) -> bool:
        """Whether anything follows the tokens that a prefill worker samples."""
        return (
            self.beams is not None
            or not self.sequence.sample_indices
            or (self.sequence.num_output_tokens + 1 < self.sequence.sampling.max_tokens)
        )

    @classmethod
    def new(
        cls, submit: Submit, new_table: Callable[[], BlockTable], outbox: Outbox, grammar: Grammar | None
    ) -> "Request":
        """Return the request for ``submit``, nothing of it computed; its output must follow ``grammar``."""
        prompt = submit.token_ids

        def sequence(token_ids: tuple[int, ...], indices: tuple[int, ...], num_forks: int = 0) -> Sequence:
            return Sequence(
                submit.request_id,
                list(token_ids),
                len(prompt),
                submit.sampling,
                new_table(),
                indices,
                num_forks,
                grammar=grammar,
            )

        samples = {one.index: sequence((*prompt, *one.output_ids), (one.index,)) for one in submit.samples}
        beam = submit.sampling.beam
        if len(samples) == 1 and beam is None:
            (first,) = samples.values()
        else:
            num_forks = len(samples) if beam is None else beam.width
            first = sequence(submit.shared_ids, submit.next_indices, num_forks)
        beams = None if beam is None else Beams.new(first, submit.sampling)
        salt, is_replay = submit.cache_salt, submit.is_replay
        return cls(submit.request_id, first, samples, outbox, beams, cache_salt=salt, is_replay=is_replay)

    def sequences(self) -> Iterable[Sequence]:
        """Return the first sequence, and those of samples and beams; some may not be in the scheduler (any more)."""
        beams = () if self.beams is None else self.beams.sequences
        return dict.fromkeys((self.sequence, *self.samples.values(), *beams))

    def report_started(self, cached_tokens: int) -> None:
        """Report, once, that the prompt is being worked on, and how much of it the cache held."""
        if not self.started:
            self.started = True
            self.outbox.put(Started(self.request_id, cached_tokens))

    def append(self, sequence: Sequence, token: SampledToken) -> FinishReason | None:
        """Give a sample its next token and report it; return why the sample ends with it, if it does."""
        output_index = sequence.num_output_tokens
        sequence.token_ids.append(token.token_id)
        finish = finish_reason(token.token_id, output_index + 1, sequence.sampling, is_complete=token.is_complete)
        self.outbox.put_output(
            SequenceOutput(
                self.request_id,
                output_index,
                (token.token_id,),
                finish,
                sample_index=token.sample_index,
                logprobs=() if token.logprobs is None else (token.logprobs,),
            )
        )
        return finish

    def report_begin(self) -> None:
        """Report that the prompt's KV is in place, where its first token is not known yet."""
        self.outbox.put_output(SequenceOutput(self.request_id, 0, (), sample_index=min(self.samples)))

    def report_answers(self, answers: Seq[Hypothesis]) -> None:
        """Report the best complete answers, one for each sample."""
        for index, answer in zip(self.samples, answers, strict=True):
            output = SequenceOutput(self.request_id, 0, answer.output_ids, answer.finish, sample_index=index)
            self.outbox.put_output(output)

    def report_prompt(self) -> None:
        """Report the prompt's log probabilities, once, when they were asked for and are complete."""
        prompt = self.sequence
        asked = prompt.sampling.prompt_logprobs is not None
        if asked and not self.prompt_reported and not prompt.wants_prompt_logprobs:
            self.prompt_reported = True
            self.outbox.put(PromptLogprobs(self.request_id, tuple(prompt.prompt_logprobs)))

    def report_failure(self, error: BatonError) -> None:
        """Report that the request is given up, with all its samples."""
        index, sequence = next(iter(self.samples.items()))
        self.outbox.put_output(
            SequenceOutput(self.request_id, sequence.num_output_tokens, (), None, to_detail(error), sample_index=index)
        )

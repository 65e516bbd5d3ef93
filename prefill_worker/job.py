"""One prompt on a prefill worker, from its queue entry to its release."""

from dataclasses import dataclass

from common.ids import TransferId
from common.messages import Handover, Prefill, SampledToken, SequenceReport
from common.sampling import finish_reason
from kvstore.outgoing import Outgoing
from kvstore.sequence import Sequence


@dataclass(slots=True, eq=False)
class Job:
    """``outgoing`` is None until the prompt has its blocks, or was refused."""

    task: Prefill
    entry_id: bytes
    sequence: Sequence
    expires_at: float
    outgoing: Outgoing | None = None
    cached_tokens: int = 0
    fetched_tokens: int = 0
    """Tokens of the prefix that were just pulled from a peer."""

    @property
    def transfer_id(self) -> TransferId:
        """The name under which its blocks are pulled."""
        return self.task.transfer_id

    @property
    def stage(self) -> str:
        """``waiting`` for blocks, ``running``, or ``lent`` until its blocks were pulled."""
        if self.outgoing is None:
            return "waiting"
        return "running" if self.outgoing.handover is None else "lent"

    def report(self) -> SequenceReport:
        """Return where it is, for people."""
        sequence = self.sequence
        return SequenceReport(
            self.task.request_id,
            self.stage,
            sequence.num_tokens,
            sequence.num_computed_tokens,
            len(sequence.table.block_ids),
        )

    def handover(self, tokens: tuple[SampledToken, ...]) -> Handover:
        """Return what its decode worker is told when the prompt is computed and these tokens were sampled from it.

        The KV is not offered when no answer goes on after its first token.
        """
        sequence, num_output_tokens = self.sequence, self.sequence.num_output_tokens + 1
        ends = [
            finish_reason(token.token_id, num_output_tokens, sequence.sampling, is_complete=token.is_complete)
            is not None
            for token in tokens
        ]
        return Handover(
            self.transfer_id,
            sequence.num_tokens,
            tokens,
            self.cached_tokens,
            has_kv=sequence.sampling.beam is not None or not (ends and all(ends)),
            prompt_logprobs=None if sequence.sampling.prompt_logprobs is None else tuple(sequence.prompt_logprobs),
        )

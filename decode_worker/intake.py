"""Who comes in: a submitted prompt is accepted, or refused with the reason."""

from common.errors import BatonError, InvalidRequest, Overloaded, Unavailable, to_detail
from common.grammar import Grammar
from common.messages import Accepted, Refused, Submit
from decode_worker.outbox import Outbox
from decode_worker.request import Request
from decode_worker.roster import Roster
from kvstore.host.parts import Parts

RETRY_AFTER_S = 1.0
"""What a refused gateway is told to wait."""


class Intake:
    """Open until :meth:`close`."""

    def __init__(self, parts: Parts, roster: Roster) -> None:
        self._parts = parts
        self._roster = roster
        self._closed = False
        self._num_refused = 0

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return {"refused": self._num_refused}

    def close(self) -> None:
        """Refuse everything from now on."""
        self._closed = True

    def submit(self, submit: Submit, outbox: Outbox, grammar: Grammar | None = None) -> None:
        """Accept or refuse a prompt, whose output must follow ``grammar``, and tell its gateway."""
        refusal = self._refusal(submit)
        if refusal is not None:
            self._num_refused += 1
            outbox.put(Refused(submit.request_id, to_detail(refusal)))
            return
        request = Request.new(submit, lambda: self._parts.new_table(submit.cache_salt), outbox, grammar)
        self._roster.add(request)
        sequence = request.sequence
        cached_tokens = 0 if sequence.wants_prompt_logprobs else sequence.table.cached_prefix(sequence.token_ids)
        outbox.put(Accepted(submit.request_id, cached_tokens))

    def _refusal(self, submit: Submit) -> BatonError | None:
        limit, config = self._parts.model.spec.max_model_len, self._parts.config
        if self._closed:
            return Unavailable("the decode worker is draining", retry_after_s=RETRY_AFTER_S)
        if self._roster.get(submit.request_id) is not None:
            return InvalidRequest("the request is here already")
        if not submit.token_ids or len(submit.token_ids) + submit.sampling.max_tokens > limit:
            return InvalidRequest(f"prompt and max_tokens must be between 1 and {limit} tokens together")
        if not 1 <= len({sample.index for sample in submit.samples}) == len(submit.samples) <= config.max_num_seqs:
            return InvalidRequest(f"there may be 1 to {config.max_num_seqs} different samples of a prompt", param="n")
        beam = submit.sampling.beam
        if beam is not None and not len(submit.samples) <= beam.width <= config.max_num_seqs:
            return InvalidRequest(
                f"there may be at most {config.max_num_seqs} beams, and n of them", param="beam_width"
            )
        if self._roster.num_requests >= config.max_num_seqs + config.max_waiting:
            return Overloaded("the decode worker's queue is full", retry_after_s=RETRY_AFTER_S)
        return None

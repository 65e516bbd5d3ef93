"""One answer to a prompt as it grows: its tokens, its text, and when they came."""

from dataclasses import replace

from common.errors import InternalError, Unavailable
from common.messages import Sample as SampleState
from common.messages import SequenceOutput
from common.sampling import FinishReason
from gateway.text.text_stream import NoText, Piece, TextStream


class Sample:
    """Owned by one flow, from the first token to the last; times are of the event loop's clock."""

    def __init__(self, index: int, text: TextStream | NoText, max_tokens: int) -> None:
        self.index = index
        """Its number among the samples of the prompt."""
        self.finish: FinishReason | None = None
        self.gap_s = 0.0
        """Between its last tokens and those before; 0 when there were none before."""
        self._text = text
        self._max_tokens = max_tokens
        self._output_ids: list[int] = []
        self._first_token_at = 0.0
        self._last_token_at = 0.0

    @property
    def num_output_tokens(self) -> int:
        """Tokens so far."""
        return len(self._output_ids)

    @property
    def state(self) -> SampleState:
        """What a worker needs to write it on."""
        return SampleState(self.index, tuple(self._output_ids))

    @property
    def decode_s(self) -> float:
        """From the first token to the last."""
        return self._last_token_at - self._first_token_at

    def take(self, output: SequenceOutput, now: float) -> Piece | None:
        """Take what a step brought; return what is new of it, if anything is.

        Raises BatonError when it does not fit what came before.
        """
        known = len(self._output_ids) - output.output_index
        if known < 0:
            raise Unavailable("the decode worker skipped tokens")
        fresh = output.token_ids[known:]
        if len(self._output_ids) + len(fresh) > self._max_tokens:
            raise InternalError("the decode worker wrote more tokens than were asked for")
        if not fresh and output.finish is None:
            return None
        piece = self._text.feed(fresh, output.finish)
        if output.logprobs:
            piece = replace(piece, logprobs=output.logprobs[known:][: len(piece.token_ids)])
        if piece.token_ids:
            self._first_token_at = self._first_token_at or now
            self.gap_s = now - (self._last_token_at or now)
            self._last_token_at = now
        self._output_ids += piece.token_ids
        self.finish = piece.finish
        return piece

"""One streamed answer as a client sees it: which events came when, and what the server says of their tokens."""

from dataclasses import dataclass, field

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_EVENT = msgspec.json.Decoder(_Event)
_END = b"[DONE]"


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are of one monotonic clock, in seconds."""

    prompt_len: int
    """Tokens that were sent; the server's own count once it has said it."""
    due_at: float = 0.0
    sent_at: float = 0.0
    ended_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """When each event with text in it came."""
    output_len: int = 0
    cached_tokens: int = 0
    error: str = ""
    """Why it failed; empty when it did not."""
    _rest: bytes = b""
    _is_complete: bool = False

    def take(self, part: bytes, at: float) -> None:
        """Take a part of the stream that came at ``at``."""
        *events, self._rest = (self._rest + part).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._data(line[5:].strip(), at)

    def finish(self, status: int, at: float) -> None:
        """The response has ended."""
        self.ended_at = at
        if status != 200:
            self.error = f"status {status}: {_message(self._rest)}"
        elif not self._is_complete and not self.error:
            self.error = "the stream ended without [DONE]"
        elif not self.token_times and not self.error:
            self.error = "no token came"

    def _data(self, data: bytes, at: float) -> None:
        if data == _END:
            self._is_complete = True
            return
        event = _EVENT.decode(data)
        if event.error is not None:
            self.error = event.error.message or "the server reported an error"
        if any(map(_has_text, event.choices)):
            self.token_times.append(at)
        if event.usage is not None:
            self.prompt_len, self.output_len = event.usage.prompt_tokens, event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            self.cached_tokens = (details.cached_tokens or 0) if details is not None else 0

    # ---- latencies, in seconds; only of an answer that did not fail ----

    @property
    def ttft_s(self) -> float:
        """From sending to the first token."""
        return self.token_times[0] - self.sent_at

    @property
    def e2el_s(self) -> float:
        """From sending to the last token."""
        return self.token_times[-1] - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token, without the first; None of a single token."""
        return (self.e2el_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else None

    @property
    def itls_s(self) -> list[float]:
        """Gaps between events."""
        return [later - at for at, later in zip(self.token_times, self.token_times[1:], strict=False)]


def _has_text(choice: _Choice) -> bool:
    delta = choice.delta
    return bool(choice.text) or (
        delta is not None and bool(delta.content or delta.reasoning_content or delta.tool_calls)
    )


def _message(body: bytes) -> str:
    try:
        error = _EVENT.decode(body).error
    except msgspec.DecodeError:
        error = None
    return error.message if error is not None else body[:200].decode(errors="replace")

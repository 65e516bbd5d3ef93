"""A streamed answer, however its bytes are cut."""

import json
from typing import Any

import pytest

from compose.bench.answer import Answer


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(value: str) -> bytes:
    return event(choices=[{"index": 0, "text": value}])


USAGE = {"prompt_tokens": 40, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
END = b"data: [DONE]\n\n"


def answered(*parts: tuple[bytes, float], status: int = 200) -> Answer:
    answer = Answer(prompt_len=9, sent_at=10.0)
    for part, at in parts:
        answer.take(part, at)
    answer.finish(status, parts[-1][1] if parts else 10.0)
    return answer


def test_latencies_are_between_events_with_text() -> None:
    answer = answered(
        (b": keep-alive\n\n", 10.1),
        (text("a"), 10.5),
        (text(""), 10.6),
        (text("b"), 11.0),
        (text("c"), 11.25),
        (event(choices=[{"text": "", "finish_reason": "length"}]), 11.5),
        (event(choices=[], usage=USAGE) + END, 12.0),
    )
    assert answer.error == ""
    assert (answer.ttft_s, answer.e2el_s, answer.ended_at) == (0.5, 1.25, 12.0)
    assert answer.itls_s == [0.5, 0.25]
    assert answer.tpot_s == pytest.approx(0.375)
    assert (answer.prompt_len, answer.output_len, answer.cached_tokens) == (40, 3, 16)


def test_bytes_may_be_cut_anywhere() -> None:
    stream = text("ü") + text("b") + event(choices=[], usage=USAGE) + END
    whole = answered((stream, 11.0))
    for size in (1, 2, 7):
        parts = [(stream[at : at + size], 11.0) for at in range(0, len(stream), size)]
        cut = answered(*parts)
        assert (cut.token_times, cut.output_len, cut.error) == (whole.token_times, whole.output_len, "")


def test_a_chat_counts_from_its_first_word_not_from_its_role() -> None:
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    word = event(choices=[{"delta": {"content": "Paris"}}])
    thought = event(choices=[{"delta": {"reasoning_content": "Hm"}}])
    assert answered((role, 10.1), (word, 10.4), (END, 10.5)).ttft_s == pytest.approx(0.4)
    assert answered((role, 10.1), (thought, 10.3), (word, 10.4), (END, 10.5)).ttft_s == pytest.approx(0.3)


def test_one_token_has_no_time_per_further_token() -> None:
    answer = answered((text("a") + event(choices=[], usage=USAGE | {"completion_tokens": 1}) + END, 10.5))
    assert (answer.tpot_s, answer.itls_s) == (None, [])


@pytest.mark.parametrize(
    ("parts", "status", "said"),
    [
        ([(b'{"error": {"message": "too long"}}', 10.1)], 400, "status 400: too long"),
        ([(b"<html>", 10.1)], 502, "status 502: <html>"),
        ([(text("a"), 10.1)], 200, "without [DONE]"),
        ([(END, 10.1)], 200, "no token"),
        ([(text("a"), 10.1), (event(error={"message": "the worker is gone"}) + END, 10.2)], 200, "the worker is gone"),
    ],
)
def test_what_failed_says_why(parts: list[tuple[bytes, float]], status: int, said: str) -> None:
    assert said in answered(*parts, status=status).error

"""How answers end: limits, end-of-sequence tokens, stop strings; and BOS."""

from typing import Any

import pytest

from tests.support import tiny_tokenizers
from tests.support.gateway_bench import ANSWER, Bench
from tests.support.tiny_tokenizers import write_model

pytestmark = pytest.mark.anyio


def choice_of(reply: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = reply["choices"][0]
    return choice


async def test_max_tokens_one_is_exactly_one_token(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    reply = (await bench.complete(max_tokens=1)).json()
    assert choice_of(reply)["text"] == bench.tokenizer.decode(bench.tokens(ANSWER)[:1])
    assert choice_of(reply)["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 1


async def test_an_answer_that_is_only_eos_is_empty_and_stops(bench: Bench) -> None:
    await bench.decode("")
    await bench.gateway()
    reply = (await bench.chat()).json()
    assert choice_of(reply)["message"]["content"] == ""
    assert choice_of(reply)["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 1
    events = await bench.stream("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
    assert [choice_of(event)["delta"] for event in events] == [{"role": "assistant", "content": ""}, {}]


async def test_ignore_eos_writes_on(bench: Bench) -> None:
    await bench.decode("Hi")
    await bench.gateway()
    reply = (await bench.complete(ignore_eos=True, max_tokens=12)).json()
    assert reply["usage"]["completion_tokens"] == 12
    assert choice_of(reply)["finish_reason"] == "length"
    assert choice_of(reply)["text"].startswith("HiHi")


@pytest.mark.parametrize("stop", ["capital of", ["nothing", "ital of Fr"], ["tal", "capital"]])
async def test_a_stop_string_ends_the_answer_and_the_work(bench: Bench, stop: Any) -> None:
    decode = await bench.decode()
    decode.faults.pause_after = len(bench.tokens(ANSWER)) - 1  # it would never finish by itself
    await bench.gateway()
    stops = [stop] if isinstance(stop, str) else stop
    cut = min(ANSWER.index(text) for text in stops if text in ANSWER)
    first = min((ANSWER.index(text) + len(text), -len(text), text) for text in stops if text in ANSWER)[2]
    reply = (await bench.complete(stop=stop)).json()
    assert choice_of(reply)["text"] == ANSWER[: ANSWER.index(first)]
    assert cut <= ANSWER.index(first)
    assert choice_of(reply)["finish_reason"] == "stop"
    assert choice_of(reply)["stop_reason"] == first
    events = await bench.stream("/v1/completions", prompt="x", stop=stop)
    assert "".join(choice_of(event)["text"] for event in events) == ANSWER[: ANSWER.index(first)]
    assert choice_of(events[-1])["finish_reason"] == "stop"
    await decode.wait_for(lambda stub: len(stub.aborts) == 2)
    assert decode.sequences == {}


async def test_tokens_that_complete_a_stop_string_are_counted(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    token_ids = bench.tokens(ANSWER)
    needed = next(n for n in range(len(token_ids)) if " capital" in bench.tokenizer.decode(token_ids[:n]))
    reply = (await bench.complete(stop=" capital", return_token_ids=True)).json()
    assert reply["usage"]["completion_tokens"] == needed
    assert choice_of(reply)["token_ids"] == token_ids[:needed]


async def test_a_stop_string_that_is_never_completed_comes_out_once(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    events = await bench.stream("/v1/completions", prompt="x", stop=["France. The end"])
    assert "".join(choice_of(event)["text"] for event in events) == ANSWER
    assert choice_of(events[-1])["finish_reason"] == "stop"
    assert "stop_reason" not in choice_of(events[-1])


async def test_a_template_that_writes_bos_gives_one_bos_and_so_does_a_raw_prompt(bench: Bench) -> None:
    bench.tokenizer = tiny_tokenizers.sentencepiece()
    template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}"
    model = write_model(
        bench.folder / "llama", bench.tokenizer, chat_template=template, eos_token="</s>", bos_token="<s>"
    )
    decode = await bench.decode(lambda submit: [*bench.tokenizer.encode("Paris is", add_special_tokens=False).ids, 2])
    await bench.gateway(model)
    chat = (await bench.chat("Hello")).json()
    text = (await bench.complete("Hello")).json()
    for submit in decode.submits:
        assert submit.token_ids[0] == 1
        assert submit.token_ids.count(1) == 1
    assert choice_of(chat)["message"]["content"] == "Paris is"
    assert choice_of(text)["text"] == " Paris is"

"""What clients get: replies, streams, usage, headers."""

import re
from typing import Any

import pytest

from tests.support.gateway_bench import ANSWER, Bench, events_of

pytestmark = pytest.mark.anyio
ID = re.compile(rb'"(chatcmpl|cmpl)-[0-9a-f]{32}"')
CREATED = re.compile(rb'"created":\d+')


def golden(raw: bytes) -> bytes:
    """Return a stream's bytes with what differs from run to run replaced."""
    return CREATED.sub(b'"created":1', ID.sub(rb'"\1"', raw))


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices)


async def test_a_chat_completion(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.gateway()
    response = await bench.chat()
    assert response.status_code == 200
    reply = response.json()
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "stub-model"
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    prompt = decode.submits[0].token_ids
    assert reply["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(bench.tokens(ANSWER)),
        "total_tokens": len(prompt) + len(bench.tokens(ANSWER)),
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert bench.tokenizer.decode(list(prompt), skip_special_tokens=False) == (
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_the_bytes_of_a_chat_stream(bench: Bench) -> None:
    await bench.decode("Hi")
    client = await bench.gateway()
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": True}}
    response = await client.post("/v1/chat/completions", json=body)
    head = b'data: {"id":"chatcmpl","object":"chat.completion.chunk","created":1,"model":"stub-model","choices":['
    tokens = [bench.tokenizer.decode([token_id]).encode() for token_id in bench.tokens("Hi", eos=False)]
    contents = b"".join(
        head + b'{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":null}]}\n\n' % token
        for token in tokens
    )
    num_prompt = len(bench.tokenizer.encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n").ids)
    num_answer = len(tokens) + 1
    assert golden(response.content) == (
        head
        + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
        + contents
        + head
        + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop"}]}\n\n'
        + head
        + b'],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        % (num_prompt, num_answer, num_prompt + num_answer)
        + b"data: [DONE]\n\n"
    )


async def test_the_bytes_of_a_completion_stream(bench: Bench) -> None:
    await bench.decode("a")
    client = await bench.gateway()
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    head = b'data: {"id":"cmpl","object":"text_completion","created":1,"model":"stub-model","choices":['
    assert golden(response.content) == (
        head
        + b'{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
        + head
        + b'{"index":0,"text":"","logprobs":null,"finish_reason":"stop"}]}\n\n'
        + b"data: [DONE]\n\n"
    )


async def test_the_headers_of_a_stream(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway()
    response = await client.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert response.headers["x-baton-route"] == "local; prefill=none; decode=decode-0; cached=0; reason=short_prompt"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_says_what_the_whole_reply_says(bench: Bench, path: str) -> None:
    answer = "👩‍👩‍👧‍👦 한국어 हिन्दी 日本語 café <think> ok"
    await bench.decode(answer)
    await bench.gateway()
    prompt: dict[str, Any] = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    events = await bench.stream(path, **prompt)
    whole = (await bench.client.post(path, json=prompt)).json()["choices"][0]
    assert text_of(events) == answer == (whole["text"] if "text" in whole else whole["message"]["content"])
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert [choice["finish_reason"] for event in events for choice in event["choices"]][-1] == "stop"


async def test_include_usage_adds_one_last_chunk_and_only_then(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    without = await bench.stream("/v1/completions", prompt="x")
    with_usage = await bench.stream("/v1/completions", prompt="x", stream_options={"include_usage": True})
    assert all(event["choices"] and "usage" not in event for event in without)
    assert with_usage[-1]["choices"] == []
    assert with_usage[-1]["usage"]["completion_tokens"] == len(bench.tokens(ANSWER))
    assert len(with_usage) == len(without) + 1


async def test_continuous_usage_stats_add_usage_to_each_chunk(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    events = await bench.stream("/v1/completions", prompt="x", stream_options={"continuous_usage_stats": True})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == len(bench.tokens(ANSWER))


async def test_cached_tokens_are_those_of_the_worker_that_computed_the_prompt(bench: Bench) -> None:
    prompt = list(range(10, 110))
    decode = await bench.decode(cached_tokens=16)
    await bench.prefill(decode, cached_tokens=48)
    await bench.gateway(prefill_expected=True)
    response = await bench.complete(prompt)
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
    assert response.headers["x-baton-route"] == "remote; prefill=prefill-0; decode=decode-0; cached=48; reason=remote"
    decode.cached_tokens = 96
    response = await bench.complete(prompt)
    assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert response.headers["x-baton-route"] == "local; prefill=none; decode=decode-0; cached=96; reason=cached"


async def test_several_prompts_are_answered_by_index(bench: Bench) -> None:
    await bench.decode(lambda submit: bench.tokens(f"answer {submit.token_ids[0]}"))
    await bench.gateway()
    prompts = [[11], [12, 13], [14]]
    reply = (await bench.complete(prompts)).json()
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "answer 11"),
        (1, "answer 12"),
        (2, "answer 14"),
    ]
    assert reply["usage"]["prompt_tokens"] == 4
    assert reply["usage"]["completion_tokens"] == sum(len(bench.tokens(f"answer {n}")) for n in (11, 12, 14))
    events = await bench.stream("/v1/completions", prompt=prompts)
    assert [text_of(events, index) for index in range(3)] == ["answer 11", "answer 12", "answer 14"]
    ends = [choice["index"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]


async def test_several_text_prompts(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.gateway()
    await bench.complete(["Hello", "world"])
    sent = sorted(bench.tokenizer.decode(list(submit.token_ids)) for submit in decode.submits)
    assert sent == ["Hello", "world"]


async def test_token_ids_are_returned_when_asked_for(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    chat = (await bench.chat(return_token_ids=True)).json()
    assert chat["choices"][0]["token_ids"] == bench.tokens(ANSWER)
    assert bench.tokenizer.decode(chat["prompt_token_ids"]).startswith("user")
    choice = (await bench.complete([11, 12], return_token_ids=True)).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([11, 12], bench.tokens(ANSWER))
    events = await bench.stream("/v1/completions", prompt=[11, 12], return_token_ids=True)
    choices = [event["choices"][0] for event in events]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == bench.tokens(ANSWER)
    assert choices[0]["prompt_token_ids"] == [11, 12]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


async def test_a_token_id_prompt_that_ends_inside_a_character_puts_no_prompt_text_into_the_answer(bench: Bench) -> None:
    emoji = [bench.tokenizer.token_to_id(character) for character in "ðŁĺĢ"]
    rest = emoji[2:]
    await bench.decode(lambda submit: [*rest, *bench.tokens(" ok")])
    await bench.gateway()
    text = (await bench.complete([*bench.tokens("Hello", eos=False), *emoji[:2]])).json()["choices"][0]["text"]
    assert text == " ok"


async def test_request_ids_are_echoed_when_sane_and_made_otherwise(bench: Bench) -> None:
    decode = await bench.decode()
    client = await bench.gateway()
    same = [
        await client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "client-1"})
        for _ in range(2)
    ]
    assert [response.headers["x-request-id"] for response in same] == ["client-1", "client-1"]
    assert len({submit.request_id for submit in decode.submits}) == 2
    assert all("client-1" not in submit.request_id for submit in decode.submits)
    for sent in ("a b", "x" * 200, "", "<script>"):
        response = await client.get("/health", headers={"x-request-id": sent})
        assert response.headers["x-request-id"].startswith("http-")


async def test_models_version_health(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway()
    card = (await client.get("/v1/models")).json()["data"][0]
    assert card["id"] == "stub-model"
    assert card["max_model_len"] == 256
    assert (await client.get("/v1/models/stub-model")).json() == card
    missing = await client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/version")).json()["version"]


async def test_events_survive_any_cutting_of_the_bytes(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway()
    async with client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        parts = [part async for part in response.aiter_bytes(1)]
    assert text_of(events_of(b"".join(parts))) == ANSWER

"""Wrong input: 400 with the field's name, a small reply, and the next request works."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx2
import pytest

from common.errors import InvalidRequest
from common.sampling import SamplingParams
from tests.support.gateway_bench import Bench

pytestmark = pytest.mark.anyio
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"prompt": "x"}
MAX_REPLY_BYTES = 1024
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def nested(depth: int) -> dict[str, Any]:
    """Return an object that is ``depth`` objects deep."""
    return {} if depth == 1 else {"a": nested(depth - 1)}


NOT_SERVED = {"type": "array", "uniqueItems": True}

BOTH = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 10_000}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**70}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": "x" * 5000}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"return_token_ids": "no"}, "return_token_ids"),
    ({"model": 5}, "model"),
    ({"n": 129}, "n"),
    ({"n": 2**31}, "n"),
    ({"n": "2"}, "n"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"n": 0}, "n"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"min_p": 1.1}, "min_p"),
    ({"typical_p": 0}, "typical_p"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
    ({"logit_bias": {"999999999": 1}}, "logit_bias"),
    ({"logit_bias": {str(n): 1 for n in range(12_000)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [5] * 12_000}, "allowed_token_ids"),
    ({"allowed_token_ids": [5], "min_tokens": "x"}, "min_tokens"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 12_000}, "bad_words"),
    ({"bad_words": ["x" * 2000]}, "bad_words"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": 10_000}, "min_tokens"),
    ({"stop_token_ids": [10**9]}, "stop_token_ids"),
    ({"stop_token_ids": [5] * 12_000}, "stop_token_ids"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"response_format": {"type": "json"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "", "schema": {}}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 5}}}, "response_format"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "response_format",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x" * 100, "schema": {}}}}, "response_format"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"structured_outputs": {"choice": ["a"], "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": {"type": "foo"}}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "start: b"}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": {"a": 1}}}, "structured_outputs"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [5]}, "allowed_token_ids"),
    ({"guided_json": {"type": "foo"}}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "(?=a)b"}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: <no_such_token>"}, "guided_grammar"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"json_schema": '{"type": "foo"}'}, "json_schema"),
    ({"regex": "[a&&b]"}, "regex"),
    ({"ebnf": "root :="}, "ebnf"),
    ({"use_beam_search": "yes"}, "use_beam_search"),
    ({"use_beam_search": True, "beam_width": 0}, "beam_width"),
    ({"use_beam_search": True, "beam_width": 129}, "beam_width"),
    ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width"),
    ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ({"use_beam_search": True, "length_penalty": 11}, "length_penalty"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "top_p": 0.9}, "top_p"),
    ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
    ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "use_beam_search"),
    ({"beam_width": 2}, "beam_width"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
    ({"bootstrap_host": "10.0.0.1"}, "bootstrap_host"),
    ({"bootstrap_room": 5}, "bootstrap_room"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"priority": 101}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"top_logprobs": "5"}, "top_logprobs"),
]
ONLY_CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "x"}, "messages"),
    ({"messages": [5]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages"),
    ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [CALL] * 500}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}] * 12_000}, "messages"),
    ({"messages": [{"role": "user", "content": "x"}] * 12_000}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
    ({"logprobs": 1}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"tools": []}, "tools"),
    ({"tools": [TOOL]}, "tools"),  # the template of the test's model knows none
    ({"tools": [TOOL] * 2}, "tools"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(65)}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(200)]}, "tools"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "some"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "none", "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"a": nested(65)}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"modalities": ["audio"]}, "modalities"),
]
ONLY_TEXT = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], 2]}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": [[1, 2], [3, -4]]}, "prompt"),
    ({"prompt": [1] * 256}, "prompt"),
    ({"prompt": ["x"] * 2000}, "prompt"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"echo": 1}, "echo"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"stream": True, "best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
]


def cases() -> list[Any]:
    found = [(f"/v1/{path}", base | extra, param) for extra, param in BOTH for path, base in ENDPOINTS.items()]
    found += [("/v1/chat/completions", CHAT | extra, param) for extra, param in ONLY_CHAT]
    found += [("/v1/completions", TEXT | extra, param) for extra, param in ONLY_TEXT]
    return found


ENDPOINTS = {"chat/completions": CHAT, "completions": TEXT}


async def test_each_wrong_field_is_named_and_the_next_request_works(bench: Bench) -> None:
    decode = await bench.decode()
    client = await bench.gateway()
    failures = []
    for path, body, param in cases():
        for stream in (False, True):
            sent = body if "stream" in body or "stream_options" in body else body | {"stream": stream}
            response = await client.post(path, json=sent)
            if not _names(response, param):
                failures.append((path, str(sent)[:80], response.status_code, response.text[:300]))
    assert failures == []
    assert decode.submits == []
    assert (await bench.chat()).status_code == 200


def _names(response: httpx2.Response, param: str) -> bool:
    """Whether ``response`` is a small 400 that names ``param``."""
    if response.status_code != 400 or len(response.content) > MAX_REPLY_BYTES:
        return False
    error = response.json()["error"]
    return bool(error["message"]) and (error["param"], error["type"]) == (param, "invalid_request_error")


RAW = [
    b"",
    b"{",
    b"nul",
    b"[]",
    b'"x"',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "x": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "x"}], "response_format": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    b"[" * 100_000,
    b'{"messages": [{"role": "user", "content": "x"}]} trailing',
]


@pytest.mark.parametrize("body", RAW, ids=range(len(RAW)))
async def test_what_is_not_sane_json_is_400(bench: Bench, body: bytes) -> None:
    await bench.decode()
    client = await bench.gateway()
    response = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert len(response.content) < MAX_REPLY_BYTES
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert (await bench.chat()).status_code == 200


NEUTRAL: dict[str, Any] = {
    "n": 1,
    "logprobs": None,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "logit_bias": None,
    "response_format": {"type": "text"},
    "stop": None,
    "stop_token_ids": [],
    "max_tokens": None,
    "seed": None,
    "temperature": None,
    "top_p": None,
    "top_k": -1,
    "stream": None,
    "stream_options": None,
    "user": "somebody",
    "metadata": {"a": "b"},
    "guided_json": None,
    "use_beam_search": False,
    "something_new": {"a": [1, 2, 3]},
}


async def test_values_that_ask_for_nothing_are_accepted(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.gateway()
    chat = {"tools": None, "tool_choice": "none", "logprobs": False, "store": False, "parallel_tool_calls": True}
    assert (await bench.chat(**NEUTRAL | chat)).status_code == 200
    assert (await bench.complete(**NEUTRAL | {"echo": False, "best_of": 1, "suffix": None})).status_code == 200
    assert all(submit.sampling.temperature == 1.0 and submit.sampling.top_k == 0 for submit in decode.submits)


async def test_served_fields_reach_the_worker(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.gateway()
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 7, "seed": -1, "max_tokens": 9, "max_completion_tokens": 5}
    await bench.chat(**fields)
    sampling = decode.submits[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.0, 0.5, 7)
    assert (sampling.seed, sampling.max_tokens) == (2**64 - 1, 5)
    assert sampling.eos_token_ids == (2,)
    fields = {
        "min_p": 0.1,
        "typical_p": 0.9,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -1,
        "logit_bias": {"5": 1, "6": -100},
        "allowed_token_ids": [5, 6, 7, 5],
        "bad_words": ["the"],
        "min_tokens": 3,
        "stop_token_ids": [9],
    }
    await bench.complete(**fields)
    submit = decode.submits.pop()
    assert set(submit.sampling.bad_words) == {tuple(bench.tokenizer.encode(word).ids) for word in ("the", " the")}
    assert submit.sampling == SamplingParams(
        max_tokens=256 - len(bench.tokenizer.encode("The capital").ids),
        min_p=0.1,
        typical_p=0.9,
        seed=submit.sampling.seed,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-1.0,
        logit_bias=((5, 1.0), (6, -100.0)),
        allowed_token_ids=(5, 6, 7),
        bad_words=submit.sampling.bad_words,
        min_tokens=3,
        eos_token_ids=(2,),
        stop_token_ids=(9,),
    )
    await bench.chat(ignore_eos=True)
    assert decode.submits[1].sampling.eos_token_ids == ()
    assert decode.submits[1].sampling.max_tokens == 256 - len(decode.submits[1].token_ids)
    await bench.chat()
    assert decode.submits[1].sampling.seed != decode.submits[2].sampling.seed


async def test_content_parts_are_text(bench: Bench) -> None:
    decode = await bench.decode()
    client = await bench.gateway()
    content = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "world"}]
    body = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": None}]}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    text = bench.tokenizer.decode(list(decode.submits[0].token_ids), skip_special_tokens=False)
    assert text.startswith("<|im_start|>user\nHello\nworld<|im_end|>")


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_and_answer_beyond_the_context_are_refused_as_json(bench: Bench, stream: bool) -> None:
    await bench.decode()
    await bench.gateway()
    response = await bench.complete([5] * 200, max_tokens=57, stream=stream)
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["param"] == "max_tokens"
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert (await bench.complete([5] * 200, max_tokens=56)).status_code == 200
    assert (await bench.complete([5] * 255)).status_code == 200


async def test_an_unknown_model_is_404(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    for response in (await bench.chat(model="other"), await bench.complete(model="x" * 10_000)):
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")
        assert response.json()["error"]["code"] == "model_not_found"
        assert len(response.content) < MAX_REPLY_BYTES
    assert (await bench.chat(model="stub-model")).status_code == 200


async def test_bodies_over_the_limit_are_413_and_the_next_request_works(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway(max_body_bytes=100_000)
    body = json.dumps(CHAT | {"x": "y" * 200_000}).encode()

    async def chunks() -> Any:
        for _ in range(40):
            yield b" " * 10_000

    json_type = {"content-type": "application/json"}
    for content in (body, chunks()):
        response = await client.post("/v1/chat/completions", content=content, headers=json_type)
        assert response.status_code == 413
        assert response.json()["error"]["type"] == "payload_too_large"
    assert (await bench.chat()).status_code == 200


async def test_other_content_types_are_400(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway()
    response = await client.post(
        "/v1/chat/completions", content=json.dumps(CHAT), headers={"content-type": "text/plain"}
    )
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


async def test_unknown_addresses_and_methods_have_the_error_shape(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway()
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("POST", "/v1/models/", 405),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/chat/completions/", 404),
    ):
        response = await client.request(method, path)
        assert (response.status_code, set(response.json()["error"])) == (status, {"message", "type", "param", "code"})
        assert response.headers["x-request-id"]


async def test_what_every_worker_refuses_as_wrong_is_400(bench: Bench) -> None:
    for name in ("decode-0", "decode-1"):
        decode = await bench.decode(name=name)
        decode.faults.refuse = InvalidRequest("the sequence never fits", param="max_tokens")
    await bench.gateway()
    response = await bench.complete()
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")


SURROGATES = [rb"\ud800", rb"\udc00", rb"a\ud83d\ud83d", rb"\ud83dx", rb"\udc00\ud800", rb"\uDBFF\u0041"]


@pytest.mark.parametrize("content", SURROGATES)
async def test_half_a_surrogate_pair_is_said_to_be_one(bench: Bench, content: bytes) -> None:
    await bench.decode()
    client = await bench.gateway()
    body = b'{"messages": [{"role": "user", "content": "%s"}]}' % content
    response = await client.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "surrogate" in response.json()["error"]["message"]
    whole = b'{"messages": [{"role": "user", "content": "\\ud83d\\ude00 \\\\ud800"}]}'
    response = await client.post("/v1/chat/completions", content=whole, headers={"content-type": "application/json"})
    assert response.status_code == 200


@pytest.mark.parametrize("sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nbad header\r\n\r\n", b"\x16\x03\x01\x02"])
async def test_what_is_no_http_is_answered_as_every_other_error(bench: Bench, sent: bytes) -> None:
    await bench.decode()
    await bench.gateway()
    assert bench.server is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", bench.server.port)
    writer.write(sent)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"x-request-id: http-" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_bounds_are_options_and_each_says_its_limit(bench: Bench) -> None:
    await bench.decode()
    bounds = {
        "max_prompts": 2,
        "max_messages": 2,
        "max_stop_strings": 1,
        "max_stop_length": 2,
        "max_list_entries": 2,
        "max_tools": 1,
        "max_schema_depth": 3,
    }
    await bench.gateway(**bounds)
    user = {"role": "user", "content": "x"}
    function = {"name": "f", "parameters": nested(4)}
    replies = [
        (await bench.complete(["a"] * 3), "prompt", "2"),
        (await bench.chat(messages=[user] * 3), "messages", "2"),
        (await bench.chat(stop=["a", "b"]), "stop", "1"),
        (await bench.chat(stop="abc"), "stop", "2"),
        (await bench.chat(logit_bias={"1": 1, "2": 1, "3": 1}), "logit_bias", "2"),
        (await bench.chat(stop_token_ids=[1, 2, 3]), "stop_token_ids", "2"),
        (await bench.chat(tools=[TOOL] * 2, tool_choice="none"), "tools", "1"),
        (await bench.chat(tools=[{"type": "function", "function": function}], tool_choice="none"), "tools", "3"),
    ]
    for reply, param, limit in replies:
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
        assert limit in reply.json()["error"]["message"]


LARGE = [
    json.dumps(CHAT | {"messages": [{"role": "user", "content": 5}] * 12_000}).encode(),
    json.dumps(CHAT | {"logit_bias": {str(n): 1 for n in range(12_000)}}).encode(),
    b'{"messages": [{"role": "user", "content": "x"}], "guided_json": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
    json.dumps(CHAT | {"x": "y" * 1_000_000}).encode()[:-1],
]
SLACK_BYTES = 32 * 1024 * 1024


async def test_wrong_input_leaves_no_memory_behind(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway()

    async def send_all(times: int) -> int:
        for body in LARGE * times:
            response = await client.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            assert response.status_code == 400
        return _resident_bytes()

    before = await send_all(3)
    assert await send_all(20) - before < SLACK_BYTES
    assert (await bench.chat()).status_code == 200


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

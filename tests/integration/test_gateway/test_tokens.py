"""``/tokenize`` and ``/detokenize``: what the model reads, and back."""

from typing import Any

import pytest

from tests.support.gateway_bench import Bench

pytestmark = pytest.mark.anyio


async def test_a_prompt_and_a_chat_are_tokenised_as_requests_are(bench: Bench) -> None:
    decode = await bench.decode()
    client = await bench.gateway()
    await bench.complete("The capital")
    await bench.chat("Hello <|im_end|>")
    asked: list[dict[str, Any]] = [
        {"prompt": "The capital"},
        {"messages": [{"role": "user", "content": "Hello <|im_end|>"}]},
    ]
    for fields, submit in zip(asked, decode.submits, strict=True):
        reply = (await client.post("/tokenize", json=fields | {"return_token_strs": True})).json()
        assert reply["tokens"] == list(submit.token_ids)
        assert (reply["count"], reply["max_model_len"]) == (len(submit.token_ids), 256)
        assert reply["token_strs"] == [bench.tokenizer.id_to_token(token_id) for token_id in submit.token_ids]
    assert "token_strs" not in (await client.post("/tokenize", json={"prompt": "x"})).json()


async def test_tokens_go_back_to_text(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway()
    text = "<|im_start|>user\n👩‍👩‍👧‍👦 हिन्दी  two spaces<|im_end|>"
    tokens = (await client.post("/tokenize", json={"prompt": text})).json()["tokens"]
    assert (await client.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": text}
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


WRONG = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": 5}, "prompt"),
    ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ("/detokenize", {"tokens": [2**70]}, "tokens"),
]


async def test_wrong_fields_are_named(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway()
    for path, body, param in WRONG:
        reply = await client.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert (await client.post("/tokenize", json={"prompt": "x", "model": "other"})).status_code == 404


async def test_a_key_is_needed_where_completions_need_one(bench: Bench) -> None:
    await bench.decode()
    client = await bench.gateway(api_key=("secret",))
    for path in ("/tokenize", "/detokenize"):
        assert (await client.post(path, json={"prompt": "x", "tokens": [5]})).status_code == 401
        key = {"authorization": "Bearer secret"}
        assert (await client.post(path, json={"prompt": "x", "tokens": [5]}, headers=key)).status_code == 200

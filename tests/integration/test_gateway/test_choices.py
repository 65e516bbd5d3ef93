"""Several answers to a prompt, and how likely their tokens are: shapes, usage, stop strings, moves."""

import asyncio
import json
import math
from typing import Any

import openai
import pytest

from common.logprobs import TokenLogprobs
from common.sampling import BeamParams
from tests.support.gateway_bench import ANSWER, Bench

pytestmark = pytest.mark.anyio
FOUR = ["one two.", "three STOP four", "five", "six seven eight nine"]
STOPPED = ["one two.", "three ", "five", "six seven eight nine"]
PROMPT = "The capital"


def texts_of(choices: list[dict[str, Any]]) -> list[str]:
    return [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]


def streamed(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the parts of each choice, in order."""
    parts: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for choice in event["choices"]:
            parts.setdefault(choice["index"], []).append(choice)
    return parts


def part_text(part: dict[str, Any]) -> str:
    text: str = part["delta"].get("content", "") if "delta" in part else part["text"]
    return text


ENDPOINTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/completions": {"prompt": "x"},
}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_n_4_with_stop_strings_gives_4_independent_choices(bench: Bench, path: str) -> None:
    decode = await bench.decode(FOUR)
    await bench.gateway()
    reply = (await bench.client.post(path, json=ENDPOINTS[path] | {"n": 4, "stop": "STOP"})).json()
    assert texts_of(reply["choices"]) == STOPPED
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["stop"] * 4
    assert reply["choices"][1]["stop_reason"] == "STOP"
    assert [sample.index for sample in decode.submits[0].samples] == [0, 1, 2, 3]
    assert (decode.sample_aborts, decode.aborts, decode.sequences) == ([1], [], {})


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_n_4_streamed_every_choice_carries_its_index_and_ends_once(bench: Bench, path: str) -> None:
    decode = await bench.decode(FOUR)
    await bench.gateway()
    events = await bench.stream(path, **ENDPOINTS[path], n=4, stop="STOP")
    parts = streamed(events)
    assert ["".join(map(part_text, parts[index])) for index in range(4)] == STOPPED
    for index in range(4):
        ends = [part["finish_reason"] for part in parts[index]]
        assert ends == [None] * (len(ends) - 1) + ["stop"]
        if "delta" in parts[index][0]:
            roles = [part["delta"].get("role") for part in parts[index]]
            assert roles == ["assistant"] + [None] * (len(roles) - 1)
    assert len(decode.submits) == 1


async def test_usage_with_n_3_counts_the_prompt_once_and_sums_the_answers(bench: Bench) -> None:
    await bench.decode(FOUR)
    await bench.gateway()
    num_prompt = len(bench.tokenizer.encode(PROMPT).ids)
    num_answers = sum(len(bench.tokens(answer)) for answer in FOUR[:3])
    usage = (await bench.complete(PROMPT, n=3)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt, num_answers)
    events = await bench.stream("/v1/completions", prompt=PROMPT, n=3, stream_options={"include_usage": True})
    assert events[-1]["usage"] == usage
    assert await bench.metric("baton_prompt_tokens_total") == 2 * num_prompt
    assert await bench.metric("baton_finished_requests_total", finished_reason="stop") == 6


async def test_choices_of_several_prompts_follow_each_other(bench: Bench) -> None:
    await bench.decode(FOUR)
    await bench.gateway()
    reply = (await bench.complete([[11], [12, 13]], n=2, return_token_ids=True)).json()
    assert texts_of(reply["choices"]) == FOUR[:2] * 2
    assert [choice["prompt_token_ids"] for choice in reply["choices"]] == [[11], [11], [12, 13], [12, 13]]


async def test_best_of_returns_the_likeliest_and_counts_all(bench: Bench) -> None:
    decode = await bench.decode(FOUR)
    likely = {token_id for answer in (FOUR[2], FOUR[0]) for token_id in bench.tokens(answer)}
    sure = set(bench.tokens(FOUR[2]))
    decode.logprobs = lambda token_id, num_top: TokenLogprobs(
        -0.1 if token_id in sure else -1.0 if token_id in likely else -9.0, 1
    )
    await bench.gateway()
    reply = (await bench.complete(n=2, best_of=4)).json()
    assert texts_of(reply["choices"]) == [FOUR[2], FOUR[0]]
    assert [choice["logprobs"] for choice in reply["choices"]] == [None, None]
    assert reply["usage"]["completion_tokens"] == sum(len(bench.tokens(answer)) for answer in FOUR)


async def test_a_beam_search_reaches_the_workers_as_it_was_asked_for(bench: Bench) -> None:
    decode = await bench.decode(FOUR)
    await bench.gateway()
    search = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.5, "early_stopping": "never"}
    for path, body in ENDPOINTS.items():
        reply = (await bench.client.post(path, json=body | search | {"n": 2, "temperature": 0})).json()
        assert texts_of(reply["choices"]) == FOUR[:2]
        assert [choice["logprobs"] for choice in reply["choices"]] == [None, None]
        assert "".join(map(part_text, streamed(await bench.stream(path, **body, **search))[0])) == FOUR[0]
    assert {submit.sampling.beam for submit in decode.submits} == {BeamParams(4, 0.5, "never")}
    assert {submit.sampling.logprobs for submit in decode.submits} == {8}
    await bench.complete(use_beam_search=True, best_of=3, n=2)
    await bench.complete(use_beam_search=True, n=2, stop_token_ids=[5, 6])
    assert [submit.sampling.beam for submit in decode.submits[-2:]] == [BeamParams(3), BeamParams(2)]
    assert decode.submits[-1].sampling.logprobs == 8


# ---- log probabilities ----


async def test_chat_logprobs_whole_and_streamed(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    asked = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 2}
    token_ids = bench.tokens(ANSWER)
    said = (await bench.client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["logprob"] for entry in said] == [-token_id / 1000 for token_id in token_ids]
    assert "".join(entry["token"] for entry in said) == ANSWER + "<|im_end|>"
    assert [bytes(entry["bytes"]).decode() for entry in said] == [entry["token"] for entry in said]
    assert [top["logprob"] for top in said[0]["top_logprobs"]] == [-token_ids[0] / 1000, -(token_ids[0] + 1) / 1000]
    (parts,) = streamed(await bench.stream("/v1/chat/completions", **asked)).values()
    assert [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]] == said


async def test_top_logprobs_0_and_logprobs_0(bench: Bench) -> None:
    await bench.decode("a")
    await bench.gateway()
    chat = (await bench.chat(logprobs=True, top_logprobs=0)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in chat] == [[], []]
    text = (await bench.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert text["top_logprobs"] == [{"a": text["token_logprobs"][0]}, {"<|im_end|>": text["token_logprobs"][1]}]
    assert (await bench.chat(logprobs=False, top_logprobs=0)).json()["choices"][0]["logprobs"] is None
    assert (await bench.complete()).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_begins_with_the_prompt_and_a_null(bench: Bench, stream: bool) -> None:
    await bench.decode()
    await bench.gateway()
    asked: dict[str, Any] = {"prompt": PROMPT, "echo": True, "logprobs": 1}
    if stream:
        (parts,) = streamed(await bench.stream("/v1/completions", **asked)).values()
        text = "".join(part["text"] for part in parts)
        said = {name: [entry for part in parts for entry in part["logprobs"][name]] for name in parts[0]["logprobs"]}
    else:
        choice = (await bench.complete(**asked)).json()["choices"][0]
        text, said = choice["text"], choice["logprobs"]
    assert text == PROMPT + ANSWER
    assert "".join(said["tokens"]) == PROMPT + ANSWER + "<|im_end|>"
    assert (said["token_logprobs"][0], said["top_logprobs"][0]) == (None, None)
    assert None not in said["token_logprobs"][1:]
    assert [text[offset:][: len(token)] for offset, token in zip(said["text_offset"], said["tokens"], strict=True)][
        :-1
    ] == said["tokens"][:-1]


async def test_echo_without_logprobs_and_of_token_ids(bench: Bench) -> None:
    await bench.decode(FOUR)
    await bench.gateway()
    token_ids = bench.tokens(PROMPT, eos=False)
    reply = (await bench.complete([token_ids], echo=True, n=2)).json()
    assert texts_of(reply["choices"]) == [PROMPT + FOUR[0], PROMPT + FOUR[1]]


async def test_echo_with_max_tokens_0_returns_the_prompt_alone(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    reply = (await bench.complete(PROMPT, echo=True, logprobs=1, max_tokens=0)).json()
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    assert reply["usage"]["completion_tokens"] == 0
    assert (await bench.complete(PROMPT, max_tokens=0)).status_code == 400


async def test_minus_infinity_is_valid_json(bench: Bench) -> None:
    decode = await bench.decode()
    decode.logprobs = lambda token_id, num_top: TokenLogprobs(-math.inf, 9, (5,) * num_top, (-math.inf,) * num_top)
    await bench.gateway()
    for body in (
        {"prompt": PROMPT, "logprobs": 1, "echo": True, "prompt_logprobs": 1},
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 1, "prompt_logprobs": 1},
    ):
        response = await bench.client.post("/v1/completions" if "prompt" in body else "/v1/chat/completions", json=body)

        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        json.loads(response.content, parse_constant=refuse)
        assert b"-9999" in response.content


async def test_prompt_logprobs_of_both_endpoints(bench: Bench) -> None:
    await bench.decode()
    await bench.gateway()
    choice = (await bench.complete([11, 12, 13], prompt_logprobs=1)).json()["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert choice["prompt_logprobs"][1] == {
        "12": {"logprob": -0.012, "rank": 1, "decoded_token": bench.tokenizer.id_to_token(12)}
    }
    assert len(choice["prompt_logprobs"]) == 3
    chat = (await bench.chat(prompt_logprobs=0)).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


async def test_a_token_that_is_no_whole_character_is_named_by_its_bytes(bench: Bench) -> None:
    await bench.decode("😀")
    await bench.gateway()
    content = (await bench.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == "😀"
    assert content[0]["token"].startswith("bytes:\\xf0")


# ---- moves ----


@pytest.mark.parametrize("after", [1, 3])
async def test_choices_move_to_another_worker_without_a_seam(bench: Bench, after: int) -> None:
    """Only what is not complete is asked for again, and no log probability is lost or repeated."""
    dying = await bench.decode(FOUR, name="decode-0")
    dying.faults.die_after = after
    await bench.gateway()
    task = asyncio.create_task(bench.complete(n=4, logprobs=0, stop="STOP", return_token_ids=True))
    await dying.wait_for(lambda stub: len(stub.submits) == 1)
    other = await bench.decode(FOUR, name="decode-1")
    reply = (await task).json()
    assert texts_of(reply["choices"]) == STOPPED
    for choice in reply["choices"]:
        assert choice["logprobs"]["token_logprobs"] == [-token_id / 1000 for token_id in choice["token_ids"]]
    moved = other.submits[0]
    assert all(len(sample.output_ids) < len(bench.tokens(FOUR[sample.index])) for sample in moved.samples)
    assert moved.token_ids == dying.submits[0].token_ids


async def test_a_client_that_leaves_gives_all_choices_up_at_once(bench: Bench) -> None:
    decode = await bench.decode(["word " * 200] * 4)
    decode.faults.pause_after = 3
    client = await bench.gateway()
    async with client.stream("POST", "/v1/completions", json={"prompt": "x", "n": 4, "stream": True}) as response:
        await anext(response.aiter_lines())
    await decode.wait_for(lambda stub: len(stub.aborts) == 1)
    assert (decode.sample_aborts, decode.sequences) == ([], {})


async def test_openai_python_accepts_choices_and_logprobs(bench: Bench) -> None:
    await bench.decode(FOUR)
    await bench.gateway()
    assert bench.server is not None
    async with openai.AsyncOpenAI(
        base_url=f"{bench.server.url}/v1", api_key="any", max_retries=0, _strict_response_validation=True
    ) as client:
        messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]
        chat = await client.chat.completions.create(
            model="stub-model", messages=messages, n=3, logprobs=True, top_logprobs=2
        )
        assert [choice.message.content for choice in chat.choices] == FOUR[:3]
        assert chat.choices[2].logprobs is not None
        assert chat.choices[2].logprobs.content is not None
        stream = await client.chat.completions.create(
            model="stub-model", messages=messages, n=3, logprobs=True, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.choices[0].index for chunk in chunks} == {0, 1, 2}
        text = await client.completions.create(model="stub-model", prompt="x", n=2, best_of=3, logprobs=2)
        assert text.choices[0].logprobs is not None
        assert text.choices[0].logprobs.tokens is not None

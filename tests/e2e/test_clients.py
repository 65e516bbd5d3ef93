"""What clients do to the real processes: the openai client, wrong input, leaving early; and nothing stays behind."""

import json
from typing import Any, Literal

import httpx2
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

from tests.support.cluster import Cluster

LONG = "The quick brown fox jumps over the lazy dog. " * 20
"""About 200 tokens: worth a prefill worker."""


def client(cluster: Cluster, *, strict: bool = True) -> OpenAI:
    return OpenAI(
        base_url=f"{cluster.url}/v1",
        api_key="any",
        max_retries=0,
        timeout=60.0,
        http_client=httpx2.Client(trust_env=False, timeout=60.0),
        _strict_response_validation=strict,
    )


def post(cluster: Cluster, path: str, body: Any) -> httpx2.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return httpx2.post(f"{cluster.url}{path}", content=content, headers=headers, timeout=60.0, trust_env=False)


def test_openai_chat_stream_and_not(cluster: Cluster) -> None:
    with client(cluster) as openai:
        (model,) = openai.models.list().data
        asked: dict[str, Any] = {
            "model": model.id,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 24,
        }
        whole = openai.chat.completions.create(**asked)
        text = whole.choices[0].message.content
        assert text is not None
        assert "Paris" in text
        assert whole.choices[0].finish_reason == "stop"
        chunks = list(openai.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
        assert chunks[-1].choices == []
        usage = chunks[-1].usage
        assert usage is not None
        assert whole.usage is not None
        assert usage.completion_tokens == whole.usage.completion_tokens


NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": NUMBER}} for name in ("pick", "add")]


SCRIPTS = "👩‍👩‍👧‍👦 한국어 हिन्दी"
"""Every character of it is several tokens of SmolLM2."""


@pytest.mark.parametrize("prompt", ["Say it.", "Say it. " + LONG])
def test_characters_cut_by_tokens_and_by_the_hand_over_come_out_whole(cluster: Cluster, prompt: str) -> None:
    """The prefill worker samples the first token of the long prompt's answer, a part of a character."""
    asked: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "prompt": prompt, "max_tokens": 80}
    with client(cluster, strict=False) as openai:
        answer = openai.completions.with_streaming_response.create(
            **asked, stream=True, extra_body={"structured_outputs": {"choice": [SCRIPTS]}}
        )
        with answer as response:
            assert response.headers["x-baton-route"].startswith("remote" if LONG in prompt else "local")
            text = "".join(chunk.choices[0].text for chunk in response.parse())
    assert text == SCRIPTS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_openai_tools_that_must_be_called(cluster: Cluster, choice: Any) -> None:
    asked: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": "Pick a number."}],
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 64,
    }
    with client(cluster) as openai:
        (called,) = openai.chat.completions.create(**asked).choices[0].message.tool_calls or []
        with openai.chat.completions.stream(**asked) as stream:
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert called.type == "function"
    assert called.function.name in ("pick", "add")
    assert isinstance(json.loads(called.function.arguments)["n"], int)
    assert (streamed.function.name, streamed.function.arguments) == (called.function.name, called.function.arguments)


class Landmark(BaseModel):
    """What the model is asked to fill in."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=40)
    country: Literal["France", "Italy", "Spain"]
    heights: list[int] = Field(max_length=3)
    is_open: bool


@pytest.mark.parametrize("padding", ["", LONG * 2], ids=["local", "remote"])
def test_openai_strict_json_schema(cluster: Cluster, padding: str) -> None:
    asked: dict[str, Any] = {
        "model": "SmolLM2-135M-Instruct",
        "messages": [{"role": "user", "content": padding + "Describe the Eiffel Tower as JSON."}],
        "max_tokens": 200,
    }
    with client(cluster) as openai:
        for seed in range(3):
            answer = openai.chat.completions.parse(response_format=Landmark, temperature=1.0, seed=seed, **asked)
            (choice,) = answer.choices
            assert choice.finish_reason == "stop"
            assert choice.message.parsed is not None
            assert choice.message.parsed.country in ("France", "Italy", "Spain")
        with openai.chat.completions.stream(response_format=Landmark, temperature=0, **asked) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed is not None


def test_openai_completions_stream_and_not(cluster: Cluster) -> None:
    asked: dict[str, Any] = {"model": "SmolLM2-135M-Instruct", "prompt": LONG, "temperature": 0, "max_tokens": 12}
    with client(cluster) as openai:
        whole = openai.completions.create(**asked)
    # The client's type of a streamed completion demands a finish_reason in every chunk; no server sends that.
    with client(cluster, strict=False) as openai:
        streamed = "".join(chunk.choices[0].text for chunk in openai.completions.create(**asked, stream=True))
    assert streamed == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12


@pytest.mark.parametrize("prompt", ["Hello", LONG + "Well,"], ids=["local", "remote"])
def test_n_4_with_logprobs_and_a_stop_string_gives_all_blocks_back(cluster: Cluster, prompt: str) -> None:
    body = {"prompt": prompt, "n": 4, "logprobs": 1, "max_tokens": 12, "stop": ["."], "seed": 3, "cache_salt": "n4"}
    reply = post(cluster, "/v1/completions", body).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert len({choice["text"] for choice in reply["choices"]}) > 1
    counts = [len(choice["logprobs"]["token_logprobs"]) for choice in reply["choices"]]
    assert reply["usage"]["completion_tokens"] == sum(counts)
    assert {worker.blocks.held for worker in cluster.wait_idle().workers} == {0}


def test_a_long_prompt_is_read_by_the_prefill_worker(cluster: Cluster) -> None:
    answer = post(cluster, "/v1/completions", {"prompt": "Once. " + LONG, "max_tokens": 3})
    assert answer.headers["x-baton-route"].startswith("remote; prefill=prefill-0; decode=decode-0; ")


@pytest.mark.parametrize(
    ("ending", "options"),
    [
        ("length", {"max_tokens": 5, "ignore_eos": True}),
        ("length", {"max_tokens": 1}),
        ("stop", {"max_tokens": 200, "stop": ["."], "temperature": 0}),
    ],
)
def test_every_ending_gives_all_blocks_back(cluster: Cluster, ending: str, options: dict[str, Any]) -> None:
    answer = post(cluster, "/v1/completions", {"prompt": LONG + "And then he said, slowly"} | options)
    assert answer.json()["choices"][0]["finish_reason"] == ending
    assert {worker.blocks.held for worker in cluster.wait_idle().workers} == {0}


@pytest.mark.parametrize("prompt", ["Hello", LONG], ids=["local", "remote"])
def test_end_of_sequence_as_the_first_token(cluster: Cluster, prompt: str) -> None:
    with client(cluster) as openai:
        first = post(cluster, "/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0})
        text = first.json()["choices"][0]["text"]
        answer = openai.completions.create(
            model="SmolLM2-135M-Instruct", prompt=prompt, temperature=0, max_tokens=50, stop=text
        )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert {worker.blocks.held for worker in cluster.wait_idle().workers} == {0}


@pytest.mark.parametrize("prompt", ["Hello", LONG * 3], ids=["local", "remote"])
@pytest.mark.parametrize("num_lines", [0, 1, 6])
def test_a_client_that_leaves_gives_all_blocks_back(cluster: Cluster, prompt: str, num_lines: int) -> None:
    body = {"prompt": f"{num_lines} {prompt}", "max_tokens": 1_000, "ignore_eos": True, "stream": True}
    with (
        httpx2.Client(timeout=60.0, trust_env=False) as http,
        http.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        for _ in range(num_lines):
            next(lines)
    assert {worker.blocks.held for worker in cluster.wait_idle().workers} == {0}


DEEP = b'{"prompt": "x", "metadata": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("n", {"prompt": "x", "n": 2**31}),
        ("top_logprobs", {"messages": [{"role": "user", "content": "x"}], "top_logprobs": "5"}),
        ("temperature", b'{"prompt": "x", "temperature": NaN}'),
        ("temperature", {"prompt": "x", "temperature": 9}),
        ("seed", {"prompt": "x", "seed": 2**70}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": []}),
        ("prompt", {"prompt": [[]]}),
        ("prompt", {"prompt": ["x"] * 12_000}),
        ("max_tokens", {"prompt": "x", "max_tokens": 1_000_000, "stream": True}),
        ("guided_json", {"prompt": "x", "guided_json": {"type": "array", "uniqueItems": True}}),
        ("stop", {"prompt": "x", "stop": [""]}),
        ("messages", {"messages": []}),
        (None, DEEP),
    ],
)
def test_wrong_input_is_a_400_that_names_it_and_the_next_request_works(
    cluster: Cluster, param: str | None, body: Any
) -> None:
    chat = isinstance(body, dict) and "messages" in body
    answer = post(cluster, "/v1/chat/completions" if chat else "/v1/completions", body)
    assert answer.status_code == 400, answer.text
    assert len(answer.content) < 1_000
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    if param is not None and not isinstance(body, bytes):
        assert error["param"] == param, error
    works = post(cluster, "/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert works.status_code == 200

"""openai-python, which validates every reply and chunk, against the gateway on a real socket."""

from collections.abc import AsyncIterator

import openai
import pytest

from common.errors import InternalError
from tests.support.gateway_bench import ANSWER, Bench

pytestmark = pytest.mark.anyio
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hello"}]


@pytest.fixture
async def client(bench: Bench) -> AsyncIterator[openai.AsyncOpenAI]:
    await bench.decode()
    await bench.gateway()
    assert bench.server is not None
    async with openai.AsyncOpenAI(
        base_url=f"{bench.server.url}/v1", api_key="any", max_retries=0, _strict_response_validation=True
    ) as opened:
        yield opened


async def test_chat(client: openai.AsyncOpenAI) -> None:
    reply = await client.chat.completions.create(model="stub-model", messages=MESSAGES, max_completion_tokens=50)
    assert reply.choices[0].message.content == ANSWER
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="stub-model", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].choices == []


async def test_completion(client: openai.AsyncOpenAI) -> None:
    reply = await client.completions.create(model="stub-model", prompt=["a", "b"], stop=[" is"])
    assert [choice.text for choice in reply.choices] == [ANSWER.split(" is")[0]] * 2
    assert [choice.index for choice in reply.choices] == [0, 1]


async def test_completion_stream(client: openai.AsyncOpenAI) -> None:
    # Not strict: the SDK's type of a completion demands a finish reason, which no chunk before the last one has (null
    # there is what OpenAI's own service sends).
    lenient = client.with_options(_extra_kwargs={"_strict_response_validation": False})
    stream = await lenient.completions.create(model="stub-model", prompt="a", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["stub-model"]
    assert (await client.models.retrieve("stub-model")).owned_by == "baton"


async def test_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="stub-model", messages=MESSAGES, temperature=9)
    assert (wrong.value.param, wrong.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert missing.value.code == "model_not_found"


async def test_an_error_in_mid_stream_is_raised(bench: Bench, client: openai.AsyncOpenAI) -> None:
    stub = bench.decodes[0]
    stub.faults.give_up_after, stub.faults.give_up_error = 2, InternalError("could not compute")
    stream = await client.chat.completions.create(model="stub-model", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="could not compute"):
        [chunk async for chunk in stream]

"""litellm against a running cluster: `python litellm_client.py URL MODEL`. Runs in an environment of its own."""

import json
import sys

import litellm

URL, MODEL = sys.argv[1], sys.argv[2]
ASK = {
    "model": f"openai/{MODEL}",
    "api_base": f"{URL}/v1",
    "api_key": "any",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 64,
    "num_retries": 0,
}
NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"], "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "pick", "description": "Pick a number", "parameters": NUMBER}}]


def main() -> None:
    """Ask whole, streamed, for a call of a tool, and wrongly."""
    whole = litellm.completion(**ASK)
    text = whole.choices[0].message.content
    assert "Paris" in text, text
    assert whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(**ASK, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    called = litellm.completion(**ASK, tools=TOOLS, tool_choice="required")
    (call,) = called.choices[0].message.tool_calls[:1]
    assert call.function.name == "pick"
    assert isinstance(json.loads(call.function.arguments)["n"], int)
    assert called.choices[0].finish_reason == "tool_calls", called.choices[0].finish_reason
    assert "temperature" in _refusal(temperature=9)


def _refusal(**wrong: object) -> str:
    try:
        litellm.completion(**ASK | wrong)
    except litellm.BadRequestError as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    main()

"""langchain-openai against a running cluster: `python langchain_client.py URL MODEL`. In an environment of its own."""

import sys
from typing import Literal

from langchain_openai import ChatOpenAI

URL, MODEL = sys.argv[1], sys.argv[2]
QUESTION = "What is the capital of France?"


def pick(n: Literal[1, 2, 3]) -> int:
    """Pick a number."""
    return n


def main() -> None:
    """Ask whole, streamed, for a call of a tool, and for a structured answer."""
    model = ChatOpenAI(
        model=MODEL, base_url=f"{URL}/v1", api_key="any", temperature=0, max_completion_tokens=128, max_retries=0
    )
    whole = model.invoke(QUESTION)
    assert "Paris" in whole.content, whole
    assert whole.usage_metadata["output_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == whole.content
    called = model.bind_tools([pick], tool_choice="required", strict=True, parallel_tool_calls=False).invoke(QUESTION)
    assert [call["name"] for call in called.tool_calls] == ["pick"], called
    assert isinstance(called.tool_calls[0]["args"]["n"], int)
    gathered = None
    for chunk in model.bind_tools([pick], tool_choice="pick", strict=True).stream(QUESTION):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered is not None
    assert gathered.tool_calls[0]["name"] == "pick"
    assert isinstance(gathered.tool_calls[0]["args"]["n"], int)


if __name__ == "__main__":
    main()

"""Tools and reasoning over HTTP: prompts, calls streamed and whole, finish reasons, openai-python's strict types."""

import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from common.constraint import Preamble
from tests.support import tiny_tokenizers
from tests.support.gateway_bench import Bench
from tests.support.tiny_tokenizers import write_model

pytestmark = pytest.mark.anyio
USER = {"role": "user", "content": "Weather?"}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "add", "description": "Adds <|im_end|>"}},
]
CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 👩‍👩‍👧"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>'
)
TEMPLATES = {
    "hermes": "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}",
    "llama3": '{% if tools %}{"name": x, "parameters": y}{{ tools | tojson }}{% endif %}',
    "mistral": "{% if tools %}[TOOL_CALLS]{{ tools | tojson }}{% endif %}",
}
MESSAGES = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    "<|im_start|>assistant\n"
)
WEATHER, ADD = '{"name": "weather", "KEY": {"city": "Zürich 👩‍👩‍👧"}}', '{"name": "add", "KEY": {"a": [1, 2]}}'
ANSWERS = {
    "hermes": CALLS,
    "llama3": f"<|python_tag|>{WEATHER}; {ADD}".replace("KEY", "parameters"),
    "mistral": f"[TOOL_CALLS][{WEATHER}, {ADD}]".replace("KEY", "arguments"),
}


MARKS = ("[TOOL_CALLS]", "<|python_tag|>", "<think>", "</think>")


async def start(
    bench: Bench, form: str = "hermes", answer: str | None = None, marks: Sequence[str] = MARKS, **options: Any
) -> None:
    """Start a gateway whose model writes calls in ``form``, ``marks`` being special tokens of the tokenizer."""
    special = [AddedToken(token, special=True) for token in marks]
    bench.tokenizer = tiny_tokenizers.byte_level()
    bench.tokenizer.add_special_tokens(special)
    decode = await bench.decode(ANSWERS[form] if answer is None else answer)
    decode.change(max_model_len=2048)
    await decode.beat()
    template = options.pop("template", TEMPLATES[form] + MESSAGES)
    await bench.gateway(write_model(bench.folder / "model", bench.tokenizer, chat_template=template), **options)


def prompt_text(bench: Bench) -> str:
    text: str = bench.tokenizer.decode(list(bench.decodes[0].submits[-1].token_ids), skip_special_tokens=False)
    return text


def joined(events: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """Return content, calls and finish reason as a client joins them by index."""
    content, calls, finish = "", {}, ""
    for choice in [choice for event in events for choice in event["choices"]]:
        content += choice["delta"].get("content", "")
        finish = choice["finish_reason"] or finish
        for part in choice["delta"].get("tool_calls", ()):
            if "id" in part:
                assert part["index"] not in calls
                calls[part["index"]] = {"id": part["id"], "name": part["function"]["name"], "arguments": ""}
                assert part["type"] == "function"
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    assert list(calls) == list(range(len(calls)))
    return content, list(calls.values()), finish


@pytest.mark.parametrize("form", TEMPLATES)
async def test_two_calls_streamed_and_whole_are_the_same(bench: Bench, form: str) -> None:
    await start(bench, form)
    whole = (await bench.chat(tools=TOOLS)).json()["choices"][0]
    expected = [("weather", {"city": "Zürich 👩‍👩‍👧"}), ("add", {"a": [1, 2]})]
    calls = [call["function"] for call in whole["message"]["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == expected
    content, streamed, finish = joined(await bench.stream("/v1/chat/completions", messages=[USER], tools=TOOLS))
    assert [(call["name"], call["arguments"]) for call in streamed] == [
        (call["name"], call["arguments"]) for call in calls
    ]
    assert finish == whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == (content or None) == ("Let me see." if form == "hermes" else None)
    ids = [call["id"] for call in streamed] + [call["id"] for call in whole["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert all(len(call_id) == 9 for call_id in ids) if form == "mistral" else ids[0].startswith("call_")


async def test_openai_python_accepts_every_reply_with_tools(bench: Bench) -> None:
    await start(bench)
    assert bench.server is not None
    async with openai.AsyncOpenAI(
        base_url=f"{bench.server.url}/v1", api_key="any", max_retries=0, _strict_response_validation=True
    ) as client:
        ask: Any = {"model": "stub-model", "messages": [USER], "tools": TOOLS, "tool_choice": "auto"}
        reply = await client.chat.completions.create(**ask)
        calls = reply.choices[0].message.tool_calls
        assert calls is not None
        assert [call.function.name for call in calls if call.type == "function"] == ["weather", "add"]
        async with client.chat.completions.stream(**ask) as stream:
            final = await stream.get_final_completion()
        found = final.choices[0].message.tool_calls
        assert found is not None
        assert [call.function.arguments for call in found] == [
            call.function.arguments for call in calls if call.type == "function"
        ]
        answers: Any = [{"role": "tool", "tool_call_id": call.id, "content": "4 <|im_end|>"} for call in found]
        await client.chat.completions.create(**ask | {"messages": [USER, final.choices[0].message, *answers]})
    text = prompt_text(bench)
    assert '{"city": "Zürich 👩‍👩‍👧"}' in text
    assert text.count("<|im_start|>tool\n4 <|im_end|><|im_end|>") == 2


async def test_special_tokens_in_tools_are_encoded_as_text(bench: Bench) -> None:
    await start(bench)
    await bench.chat(tools=TOOLS)
    assert "Adds <|im_end|>" in prompt_text(bench)
    end = bench.tokenizer.token_to_id("<|im_end|>")
    assert list(bench.decodes[0].submits[-1].token_ids).count(end) == 1


async def test_tool_choice_none_shows_no_tools_and_reads_no_calls(bench: Bench) -> None:
    await start(bench)
    choice = (await bench.chat(tools=TOOLS, tool_choice="none")).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (CALLS, "stop")
    assert "tool_calls" not in choice["message"]
    assert "weather" not in prompt_text(bench)


async def test_without_parallel_calls_there_is_one(bench: Bench) -> None:
    await start(bench)
    choice = (await bench.chat(tools=TOOLS, parallel_tool_calls=False)).json()["choices"][0]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


async def test_an_answer_cut_in_a_call_finishes_with_length(bench: Bench) -> None:
    await start(bench)
    limit = len(bench.tokenizer.encode(CALLS[:60]).ids)
    _, calls, finish = joined(
        await bench.stream("/v1/chat/completions", messages=[USER], tools=TOOLS, max_tokens=limit)
    )
    assert ([call["name"] for call in calls], finish) == (["weather"], "length")


async def test_a_stop_string_ends_an_answer_before_its_calls(bench: Bench) -> None:
    await start(bench)
    choice = (await bench.chat(tools=TOOLS, stop=["see"])).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me ", "stop")


async def test_the_operator_may_name_the_form_or_switch_tools_off(bench: Bench) -> None:
    await start(bench, template=MESSAGES, tool_parser="hermes")
    assert (await bench.chat(tools=TOOLS)).json()["choices"][0]["finish_reason"] == "tool_calls"
    await bench.gateway(bench.folder / "model", tool_parser="none")
    refused = await bench.chat(tools=TOOLS)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


async def test_a_demanded_call_is_a_schema_for_the_worker_and_its_answer_is_read_as_json(bench: Bench) -> None:
    await start(bench, template=MESSAGES, answer='[{"name": "weather", "parameters": {"city": "Bern"}}]')
    choice = (await bench.chat(tools=TOOLS, tool_choice="required")).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    constraint = bench.decodes[0].submits[-1].sampling.constraint
    assert constraint is not None
    schema = json.loads(constraint.text)
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["weather", "add"]
    await bench.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert json.loads(bench.decodes[0].submits[-1].sampling.constraint.text)["maxItems"] == 1


async def test_a_named_call_is_its_arguments_and_no_reason_to_finish(bench: Bench) -> None:
    await start(bench, template=MESSAGES + "<think>\n", answer='Bern?</think>{"city": "Bern"}')
    named = {"type": "function", "function": {"name": "weather"}}
    choice = (await bench.chat(tools=TOOLS, tool_choice=named)).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", None)
    assert choice["message"]["reasoning_content"] == "Bern?"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    constraint = bench.decodes[0].submits[-1].sampling.constraint
    assert constraint is not None
    assert json.loads(constraint.text) == TOOLS[0]["function"]["parameters"]


async def test_a_demanded_call_and_another_structure_exclude_each_other(bench: Bench) -> None:
    await start(bench)
    refused = await bench.chat(tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format")
    broken = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]
    refused = await bench.chat(tools=broken, tool_choice="required")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize(("opening", "opened"), [("", False), ("<think>\n", True)])
async def test_a_thinking_model_thinks_before_its_structure(bench: Bench, opening: str, opened: bool) -> None:
    thought = ("" if opened else "<think>") + "Is it {1}?\n</think>\n\n"
    await start(bench, template=MESSAGES + (opening or "{# <think> #}"), answer=thought + '{"a": 1}')
    message = (await bench.chat(response_format={"type": "json_object"})).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Is it {1}?", '{"a": 1}')
    constraint = bench.decodes[0].submits[-1].sampling.constraint
    begin, end = (bench.tokenizer.token_to_id(mark) for mark in ("<think>", "</think>"))
    assert constraint is not None
    assert constraint.preamble == Preamble(end, None if opened else begin)


async def test_a_structure_rules_from_the_beginning_when_the_prompt_has_closed_the_reasoning(bench: Bench) -> None:
    await start(bench, template=MESSAGES + "<think>\n\n</think>\n\n", answer='{"a": 1}')
    message = (await bench.chat(response_format={"type": "json_object"})).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": '{"a": 1}', "refusal": None}
    constraint = bench.decodes[0].submits[-1].sampling.constraint
    assert constraint is not None
    assert constraint.preamble is None


async def test_a_mark_of_several_tokens_cannot_be_waited_for(bench: Bench) -> None:
    await start(bench, template=MESSAGES + "{# <think> #}", answer='{"a": 1}', marks=())
    message = (await bench.chat(response_format={"type": "json_object"})).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": '{"a": 1}', "refusal": None}
    constraint = bench.decodes[0].submits[-1].sampling.constraint
    assert constraint is not None
    assert constraint.preamble is None


@pytest.mark.parametrize("opened_by_template", [False, True])
async def test_reasoning_has_its_own_field(bench: Bench, opened_by_template: bool) -> None:
    opening = "<think>\n"
    answer = ("" if opened_by_template else opening) + "Hm, Zürich.\n</think>\n\nIt is 4."
    template = MESSAGES + ("<think>\n" if opened_by_template else "{# <think> #}")
    await start(bench, template=template, answer=answer)
    message = (await bench.chat()).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm, Zürich.", "It is 4.")
    events = await bench.stream("/v1/chat/completions", messages=[USER])
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, Zürich."
    assert "".join(delta.get("content", "") for delta in deltas) == "It is 4."


async def test_reasoning_can_be_left_in_the_text(bench: Bench) -> None:
    await start(bench, template=MESSAGES + "{# <think> #}", answer="<b>x</b>", reasoning_parser="none")
    message = (await bench.chat()).json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<b>x</b>", "refusal": None}


async def test_variables_reach_the_template(bench: Bench) -> None:
    await start(bench, template=MESSAGES + "{% if enable_thinking is false %}off {{ note }}{% endif %}", answer="x")
    await bench.chat(chat_template_kwargs={"enable_thinking": False, "note": "<|im_end|>"})
    assert prompt_text(bench).endswith("off <|im_end|>")
    assert bench.decodes[0].submits[-1].token_ids.count(bench.tokenizer.token_to_id("<|im_end|>")) == 1


async def test_a_requests_template_is_used_when_the_operator_trusts_it(bench: Bench) -> None:
    await start(bench, answer="x", trust_request_template=True)
    await bench.chat("Hi", chat_template="[{{ messages[0].content }}]")
    assert prompt_text(bench) == "[Hi]"
    for template in ("{% for %}", "{{ 'x' * 10**12 }}", "{{ raise_exception('no') }}"):
        refused = await bench.chat(chat_template=template)
        assert refused.status_code == 400
        assert len(refused.content) < 512
    assert (await bench.chat()).status_code == 200

"""Tool calls in every form: cut at every byte, the joined parts are those of the whole text."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.message_stream import ContentText, MessageStream, ReasoningText, ToolCallArguments, ToolCallStart
from gateway.text.thinking import ThinkReader
from gateway.tools.forced import NamedForm, RequiredForm
from gateway.tools.forms import KINDS, FormName, form_of_template
from gateway.tools.parts import ToolForm
from gateway.tools.tool import Tool

TOOLS = (
    Tool("weather", None, {"properties": {"city": {"type": "string"}, "days": {"type": "array"}, "note": {}}}),
    Tool(
        "add", None, {"properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "number"}, {"type": "null"}]}}}
    ),
)
WEATHER = {"city": 'São Paulo "centro" \\ {[', "days": [1, 2, {"x": None}], "note": "</tool_call>;[TOOL_CALLS]"}
ADD = {"a": 1, "b": -2.5e3}


@dataclass(slots=True)
class Message:
    """What a client puts together from the parts."""

    content: str = ""
    reasoning: str = ""
    ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)

    @property
    def calls(self) -> list[tuple[str, object]]:
        return [(name, json.loads(text)) for name, text in zip(self.names, self.arguments, strict=True)]


def read(stream: MessageStream, pieces: Sequence[str]) -> Message:
    message = Message()
    for part in [part for piece in pieces for part in stream.feed(piece)] + stream.flush():
        match part:
            case ContentText(text):
                message.content += text
            case ReasoningText(text):
                message.reasoning += text
            case ToolCallStart(index, call_id, name):
                assert index == len(message.ids)
                message.ids.append(call_id)
                message.names.append(name)
                message.arguments.append("")
            case ToolCallArguments(index, text):
                assert index == len(message.ids) - 1
                message.arguments[index] += text
    return message


def stream(form: ToolForm | None, *, thinks: bool | None = None, parallel: bool = True) -> MessageStream:
    numbers = count()
    think = None if thinks is None else ThinkReader(begins_inside=thinks)
    return MessageStream(think, form, lambda: f"id-{next(numbers)}", parallel=parallel)


def two_cuts(text: str) -> Iterator[list[str]]:
    """Yield ``text`` cut at each character, and character by character."""
    yield from ([text[:at], text[at:]] for at in range(len(text) + 1))
    yield list(text)


def call(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def xml(name: str, arguments: dict[str, object]) -> str:
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{parameters}</function>"


FORMS: dict[str, Callable[[], ToolForm]] = {
    "hermes": lambda: KINDS[FormName.HERMES].make(TOOLS),
    "llama3": lambda: KINDS[FormName.LLAMA3].make(TOOLS),
    "mistral": lambda: KINDS[FormName.MISTRAL].make(TOOLS),
    "xml": lambda: KINDS[FormName.XML].make(TOOLS),
    "required": RequiredForm,
}
TWO_CALLS = {
    "hermes": (
        f"<tool_call>\n{call('weather', WEATHER)}\n</tool_call>\n<tool_call>\n{call('add', ADD)}\n</tool_call>",
        f"<tool_call>{call('weather', WEATHER)}</tool_call><tool_call>{call('add', ADD)}",
        f"<tool_call>{json.dumps({'arguments': WEATHER, 'name': 'weather'})}\n<tool_call>{call('add', ADD)}",
    ),
    "llama3": (
        f"{call('weather', WEATHER, 'parameters')}; {call('add', ADD, 'parameters')}",
        f"<|python_tag|>{call('weather', WEATHER, 'parameters')};{call('add', ADD, 'parameters')}",
        f"\n{call('weather', WEATHER)}\n{call('add', ADD, 'parameters')}\n",
    ),
    "mistral": (
        f"[TOOL_CALLS][{call('weather', WEATHER)}, {call('add', ADD)}]",
        f"[TOOL_CALLS] [{call('weather', WEATHER)},\n{call('add', ADD)}] ",
        f"[TOOL_CALLS]weather[ARGS]{json.dumps(WEATHER)}[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{json.dumps(ADD)}",
        f"[TOOL_CALLS]weather{json.dumps(WEATHER)}\n[TOOL_CALLS]add {json.dumps(ADD)}",
    ),
    "xml": (
        f"<tool_call>\n{xml('weather', WEATHER)}\n</tool_call>\n<tool_call>\n{xml('add', ADD)}\n</tool_call>",
        f"{xml('weather', WEATHER)}\n{xml('add', ADD)}</tool_call>",
        f"<tool_call>{xml('weather', WEATHER)}<tool_call>{xml('add', ADD)}".replace("\n", "").replace(">", ">\n", 1),
    ),
    "required": (
        f"[{call('weather', WEATHER, 'parameters')}, {call('add', ADD, 'parameters')}]",
        f" [\n{call('weather', WEATHER)}\n,{call('add', ADD)}]\n",
    ),
}
CASES = [(name, text) for name, texts in TWO_CALLS.items() for text in texts]


@pytest.mark.parametrize(("name", "text"), CASES)
def test_two_calls_cut_at_every_character_are_the_calls_of_the_whole(name: str, text: str) -> None:
    whole = read(stream(FORMS[name]()), [text])
    assert whole.calls == [("weather", WEATHER), ("add", ADD)]
    assert whole.ids == ["id-0", "id-1"]
    assert whole.content == ""
    for pieces in two_cuts(text):
        assert read(stream(FORMS[name]()), pieces) == whole


ONE_CALL = {
    "hermes": f"<tool_call>{call('weather', WEATHER)}</tool_call>",
    "mistral": TWO_CALLS["mistral"][0],
    "xml": f"<tool_call>{xml('weather', WEATHER)}</tool_call>",
}


@pytest.mark.parametrize("name", ONE_CALL)
def test_text_before_and_between_calls_is_content_and_the_space_beside_them_is_not(name: str) -> None:
    text = f"Let me look. \n\n{ONE_CALL[name]}\n and then\n{ONE_CALL[name]}\n"
    whole = read(stream(FORMS[name]()), [text])
    assert whole.content == "Let me look.and then"
    assert [found for found in whole.calls if found[0] == "weather"] == [("weather", WEATHER)] * 2
    for pieces in two_cuts(text):
        assert read(stream(FORMS[name]()), pieces) == whole


NO_CALLS = [
    "",
    "   ",
    "The weather is fine. ",
    "\n a <tool_cal of [TOOL_CALL {",
    '{"name": "nobody", "parameters": {}}',
    '{"city": "Paris"}',
    '{"name": "weath',
    "{",
    "[1, 2]",
    "<tool_call>",
    "<tool_call>\nnot json</tool_call",
    "[TOOL_CALLS]",
    "[TOOL_CALLS] are made with a marker",
    "[TOOL_CALLS][1, 2]",
    "<|python_tag|>print(1)",
    "<|python_tag",
    "a mark such as <function=nobody> or <tool_call> is [TOOL_CALLS] text",
    "<tool_call>\n<function=",
    "<tool_call> <function=we<ather>",
    "<function=weather",
]


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "xml"])
@pytest.mark.parametrize("text", NO_CALLS)
def test_text_that_is_no_call_is_content_and_nothing_of_it_is_lost(name: str, text: str) -> None:
    if name in ("hermes", "xml") and text.endswith("</tool_call"):
        text += ">"
    if name == "hermes" and "nobody" in text:
        return
    whole = read(stream(FORMS[name]()), [text])
    assert whole.names == []
    assert whole.content == text.replace("</tool_call>", "")
    for pieces in two_cuts(text):
        assert read(stream(FORMS[name]()), pieces) == whole


@pytest.mark.parametrize(("name", "text"), CASES)
def test_an_answer_cut_by_its_length_keeps_what_it_had(name: str, text: str) -> None:
    for length in range(len(text)):
        whole = read(stream(FORMS[name]()), [text[:length]])
        assert read(stream(FORMS[name]()), list(text[:length])) == whole
        assert whole.names == ["weather", "add"][: len(whole.names)]


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=200)
@given(data=st.data())
def test_any_text_in_any_cut_gives_the_same_message(name: str, data: st.DataObject) -> None:
    words = [*'{}[]",:;\\ \n', "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '"name"']
    words += ["<function=", "weather>", "<parameter=", "city>", "</parameter>", "</function>", "days>"]
    words += ['"arguments"', '"weather"', '{"name": "weather", "arguments": {', "x", "1", "null", call("add", ADD)]
    pieces = data.draw(st.lists(st.sampled_from(words), max_size=25))
    text = "".join(pieces)
    whole = read(stream(FORMS[name]()), [text])
    assert read(stream(FORMS[name]()), pieces) == whole
    assert read(stream(FORMS[name]()), list(text)) == whole


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "\n  two\nlines \n", "\n  two\nlines \n"),
        (None, "5", "5"),
        ({"type": ["null", "string"]}, "null", "null"),
        ({"enum": ["a", 1]}, "1", "1"),
        ({"type": "integer"}, " 5 ", 5),
        ({"enum": [1, 2]}, "2", 2),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": ["integer", "null"]}, "None", None),
        ({"type": "object"}, "{'a': (1, 2)}", {"a": [1, 2]}),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "", ""),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_a_value_in_xml_is_what_the_schema_says(schema: object, text: str, value: object) -> None:
    tool = Tool("f", None, {"properties": {} if schema is None else {"x": schema}})
    found = read(stream(KINDS[FormName.XML].make([tool])), [xml("f", {"x": text})])
    assert found.calls == [("f", {"x": value})]


def test_a_string_in_xml_is_passed_on_as_it_is_written_and_left_open_when_it_is_cut() -> None:
    form = stream(FORMS["xml"]())
    form.feed("<tool_call><function=weather><parameter=city>\nrm -r ")
    assert form.feed("./build") == [ToolCallArguments(0, "./build")]
    assert form.flush() == []


def test_without_parallel_calls_only_the_first_is_kept() -> None:
    found = read(stream(FORMS["hermes"](), parallel=False), list(TWO_CALLS["hermes"][0]))
    assert found.calls == [("weather", WEATHER)]


def test_arguments_that_come_as_a_string_are_its_content_and_missing_ones_are_empty() -> None:
    text = f"<tool_call>{call('add', json.dumps(ADD))}</tool_call>" + '<tool_call>{"name": "weather"}</tool_call>'
    for pieces in two_cuts(text):
        assert read(stream(FORMS["hermes"]()), pieces).calls == [("add", ADD), ("weather", {})]


def test_a_named_call_is_its_arguments() -> None:
    for pieces in two_cuts(json.dumps(WEATHER)):
        assert read(stream(NamedForm("weather")), pieces).calls == [("weather", WEATHER)]
    assert read(stream(NamedForm("weather")), [""]).names == []


THOUGHTS = [
    (False, "<think>\nWell.\n</think>\n\nParis", "Well.", "Paris"),
    (True, "Well. <think>?\n</think>Paris\n", "Well. <think>?", "Paris\n"),
    (False, " \n<think></think>Paris", "", "Paris"),
    (False, "Paris <think>no</think>", "", "Paris <think>no</think>"),
    (False, "<think>never ends </thin", "never ends </thin", ""),
    (True, "never ends ", "never ends", ""),
    (False, "<thi", "", "<thi"),
    (False, " <b>", "", " <b>"),
]


@pytest.mark.parametrize(("inside", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_sorted_from_content_in_every_cut(inside: bool, text: str, reasoning: str, content: str) -> None:
    for pieces in two_cuts(text):
        found = read(stream(None, thinks=inside), pieces)
        assert (found.reasoning, found.content) == (reasoning, content)


def test_calls_are_looked_for_after_the_reasoning_only() -> None:
    text = f"<think>Shall I <tool_call>?</think>\n<tool_call>{call('add', ADD)}</tool_call>"
    for pieces in two_cuts(text):
        found = read(stream(FORMS["hermes"](), thinks=False), pieces)
        assert (found.reasoning, found.content, found.calls) == ("Shall I <tool_call>?", "", [("add", ADD)])


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{% if tools %}return <tool_call>{json}</tool_call>{% endif %}", FormName.HERMES),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", FormName.MISTRAL),
        ('{% if tools %}respond with {"name": name, "parameters": {}}{% endif %}', FormName.LLAMA3),
        ("{% if tools %}<tool_call><function=x>{% endif %}", FormName.XML),
        ("{% for m in messages %}<tool_call>{% endfor %}", None),
        ("{{ messages }}", None),
    ],
)
def test_the_form_is_chosen_from_the_chat_template(template: str, form: FormName | None) -> None:
    assert form_of_template(template) is form

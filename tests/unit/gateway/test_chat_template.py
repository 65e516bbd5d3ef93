"""Chat templates: what they are given, and the limits they run within."""

import pytest

from common.errors import ConfigError, InvalidRequest
from gateway.text.chat_template import MAX_STEPS, ChatMessage, ChatPrompt, ChatTemplate

USER = ChatMessage("user", "Hello")
QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<tool_call>{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}{% if enable_thinking is false %}<no>{% endif %}"
)


def render(source: str, prompt: ChatPrompt | None = None) -> str:
    return ChatTemplate(source, {}).render(prompt or ChatPrompt.of([USER]))


def test_tools_calls_and_results_reach_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    messages = [
        USER,
        ChatMessage("assistant", "", reasoning="Hm", tool_calls=(call,)),
        ChatMessage("tool", "3", tool_call_id="1"),
    ]
    prompt = ChatPrompt([message.as_dict() for message in messages], [{"name": "add"}], {"enable_thinking": False})
    assert render(QWEN, prompt) == (
        '<tools>{"name": "add"}</tools><user>Hello<assistant>(Hm)<tool_call>add {"a": "é"}<tool>3<no>'
    )


def test_a_client_cannot_set_what_the_gateway_sets() -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages | length }}", {"bos_token": "<s>"})
    assert template.render(ChatPrompt([USER.as_dict()], None, {"bos_token": "x", "messages": []})) == "<s>1"


TOO_MUCH = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop over messages": "{% for a in messages * 5000 %}{% for b in messages * 5000 %}{% endfor %}{% endfor %}",
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "recursion without end": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a repetition": "{{ 'x' * 100000000000 }}",
    "a power": "{{ 10 ** 10 ** 10 }}",
    "growing products": "{% set n = namespace(x=9) %}{% for _ in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "a long text": "{% for a in range(90) %}{{ 'x' * 1000000 }}{% endfor %}",
    "a long range": "{{ range(10**7) | list | length }}",
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_template_that_asks_for_too_much_is_ended(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(TOO_MUCH[name])
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("source", ["{{ 5 | dictsort }}", "{{ 1 / 0 }}", "{{ messages | sum }}", "{{ none.x.y }}"])
def test_whatever_a_template_raises_is_the_clients_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        render(source)


def test_many_messages_are_within_the_limits() -> None:
    text = render("{% for m in messages %}{{ m.content }}{% endfor %}", ChatPrompt.of([USER] * 10_000))
    assert text == "Hello" * 10_000
    assert MAX_STEPS >= 50 * 10_000


def test_ordinary_arithmetic_works() -> None:
    assert render("{{ 3 * 4 }} {{ '=' * 5 }} {{ 2 ** 10 }} {{ 0.5 * 3 }} {{ [1] * 2 }}") == "12 ===== 1024 1.5 [1, 1]"


NONE = {
    "a tag without its parts": "{% for %}",
    "no end": "{{ x",
    "an unknown tag": "{% nothing %}",
    "too many brackets": "{{ " + "(" * 5000,
    "loops in loops": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
    "a number without end": "{{ " + "1" * 10_000 + " }}",
    "a filter that is none": "{{ 1 | nothing }}",
}


@pytest.mark.parametrize("source", NONE.values(), ids=NONE)
def test_a_template_that_is_none_is_a_clear_error(source: str) -> None:
    with pytest.raises(ConfigError, match="not valid"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ baton_step.__self__.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_nothing_outside_can_be_reached_or_changed(source: str) -> None:
    prompt = ChatPrompt.of([USER])
    with pytest.raises(InvalidRequest, match="cannot render"):
        render(source, prompt)
    assert prompt == ChatPrompt.of([USER])

"""Masks over the tokens of real kinds of tokenizers: what they let through is in the language, and replays."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.constraint import Constraint, Preamble, json_rule
from common.errors import InternalError, InvalidRequest
from common.grammar import Grammar, byte_tokenizer, compile_grammar, model_tokenizer
from common.model.grammar_state import GrammarState
from tests.support.tiny_tokenizers import byte_level, metaspace, sentencepiece

MAX_STEPS = 3000


class Writer:
    """Writes random answers in a language, with one tokenizer."""

    def __init__(self, make: Callable[[], Tokenizer], eos: str) -> None:
        self.text = make()
        self.vocab_size = self.text.get_vocab_size() + 8
        self.eos = self.text.token_to_id(eos)
        self.tokens = model_tokenizer(self.text.to_str(), self.vocab_size, [self.eos])

    def grammar(self, constraint: Constraint) -> Grammar:
        return compile_grammar(constraint, self.tokens)

    def write(self, constraint: Constraint, seed: int) -> list[int] | None:
        """Return the tokens of one answer, or None when it became too long."""
        rng, state = random.Random(seed), GrammarState(self.grammar(constraint), (self.eos,))
        output: list[int] = []
        for _ in range(MAX_STEPS):
            token_id = int(rng.choice(np.flatnonzero(state.allowed(self.vocab_size))))
            is_complete = state.is_complete_with(token_id)
            assert state.error is None
            output.append(token_id)
            if is_complete:
                return output
            state.extend([token_id])
        return None

    def decode(self, token_ids: list[int]) -> str:
        without_end = token_ids[:-1] if token_ids[-1] == self.eos else token_ids
        text: str = self.tokens.decode_bytes(without_end).decode()
        return text


WRITERS = {
    "byte_level": Writer(byte_level, "<|im_end|>"),
    "llama": Writer(sentencepiece, "</s>"),
    "gemma": Writer(lambda: sentencepiece(strip=False), "</s>"),
}
ANY_WRITER = pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)

NESTED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 'q"', 7, None]}, "maxItems": 3},
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
            "additionalProperties": False,
        },
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@ANY_WRITER
@pytest.mark.parametrize("seed", range(4))
def test_what_a_schema_lets_through_is_json_that_it_allows(writer: Writer, seed: int):
    output = writer.write(Constraint.json_schema(json.dumps(NESTED)), seed)
    assert output is not None
    value = json.loads(writer.decode(output))
    assert list(value)[:2] == ["name", "tags"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert set(map(str, value["tags"])) <= {"a", "é", 'q"', "7", "None"}


@ANY_WRITER
def test_a_choice_is_written_to_the_letter(writer: Writer):
    options = ["yes", "no", 'a "quoted" one', "back\\slash\n", "日本", "/x/", "[a-z]+"]
    constraint = Constraint.choice(options)
    written = {writer.decode(writer.write(constraint, seed) or []) for seed in range(40)}
    assert written <= set(options)
    assert len(written) > 3


@ANY_WRITER
def test_a_regex_holds_for_the_whole_answer(writer: Writer):
    constraint = Constraint.regex("[0-9]{3}-(ab|c)+")
    for seed in range(10):
        output = writer.write(constraint, seed)
        assert output is None or re.fullmatch("[0-9]{3}-(ab|c)+", writer.decode(output))


@pytest.mark.parametrize("text", ['start: "<<" body ">>"\nbody: /[ab]{2}/', 'root ::= "<<" [ab] [ab] ">>"'])
def test_a_grammar_in_either_form(text: str):
    written = {WRITERS["llama"].decode(WRITERS["llama"].write(Constraint.grammar(text), n) or []) for n in range(20)}
    assert written == {f"<<{a}{b}>>" for a in "ab" for b in "ab"}


def test_json_inside_a_grammar_and_special_tokens_by_name():
    writer = WRITERS["byte_level"]
    schema = '{"enum": ["a", 5]}'
    constraint = Constraint.grammar(f"start: <|im_start|> {json_rule(schema)} <|im_start|>")
    output = writer.write(constraint, 1)
    assert output is not None
    special = writer.text.token_to_id("<|im_start|>")
    assert (output[0], output[-1]) == (special, special)
    assert json.loads(writer.decode(output[1:-1])) in ("a", 5)
    compile_grammar(constraint, byte_tokenizer(["<|im_start|>"]))
    with pytest.raises(InvalidRequest, match="special token"):
        compile_grammar(constraint, byte_tokenizer())


BOUNDED = st.recursive(
    st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(
            lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n},
            st.integers(-99, 99),
            st.integers(0, 9),
        ),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 4)),
        st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=4), min_size=1, max_size=3)),
    ),
    lambda inner: st.one_of(
        st.builds(lambda items, n: {"type": "array", "items": items, "maxItems": n}, inner, st.integers(0, 2)),
        st.builds(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
            st.dictionaries(st.text(max_size=4), inner, max_size=3),
        ),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(schema=BOUNDED, seed=st.integers(0, 2**32))
def test_answers_to_random_schemas_are_json_and_replay_from_any_point(schema: dict[str, Any], seed: int):
    writer, constraint = WRITERS["byte_level"], Constraint.json_schema(json.dumps(schema))
    output = writer.write(constraint, seed)
    if output is None:
        return
    json.loads(writer.decode(output))
    cut = seed % len(output)
    grown, replayed = (GrammarState(writer.grammar(constraint), (writer.eos,)) for _ in range(2))
    for token_id in output[:cut]:
        grown.extend([token_id])
    replayed.extend(output[:cut])
    assert (grown.allowed(writer.vocab_size) == replayed.allowed(writer.vocab_size)).all()
    assert replayed.allowed(writer.vocab_size)[output[cut]]


def test_an_end_is_allowed_only_where_the_answer_may_end_and_withheld_unless_it_must():
    writer = WRITERS["byte_level"]
    grammar = writer.grammar(Constraint.regex("ab?"))
    (a,), (b,) = writer.text.encode("a").ids, writer.text.encode("b").ids
    free, withheld = GrammarState(grammar, (writer.eos,)), GrammarState(grammar, ())
    assert not free.allowed(writer.vocab_size)[writer.eos]
    for state in (free, withheld):
        state.extend([a])
    assert free.allowed(writer.vocab_size)[[writer.eos, b]].all()
    assert list(np.flatnonzero(withheld.allowed(writer.vocab_size))) == [b]
    assert free.is_complete_with(writer.eos)
    assert free.is_complete_with(b)
    assert not free.is_complete_with(b) or free.error is None


def with_preamble(writer: Writer, preamble: Preamble) -> GrammarState:
    constraint = msgspec.structs.replace(Constraint.choice(["Paris"]), preamble=preamble)
    return GrammarState(writer.grammar(constraint), (writer.eos,))


@pytest.mark.parametrize("cut", range(6))
def test_a_preamble_is_free_but_may_not_end_the_answer(cut: int):
    writer = WRITERS["byte_level"]
    start, end, other = 300, 301, 302
    word = writer.text.encode("Paris").ids
    state, size = with_preamble(writer, Preamble(end, start)), writer.vocab_size
    ruled = GrammarState(writer.grammar(Constraint.choice(["Paris"])), (writer.eos,)).allowed(size)
    first = state.allowed(size)
    assert [*np.flatnonzero(first)] == sorted({*np.flatnonzero(ruled), start})
    assert not state.is_complete_with(start)
    thought = [start, other, *word, start, other]
    state.extend(thought[:cut])
    state.extend(thought[cut:])
    assert [*np.flatnonzero(~state.allowed(size))] == [writer.eos]
    assert not state.is_complete_with(end)
    state.extend([end])
    assert [*state.allowed(size)] == [*ruled]
    state.extend(word[:-1])
    assert state.is_complete_with(word[-1])
    assert state.error is None


def test_a_preamble_may_be_begun_by_the_prompt_or_left_out():
    writer = WRITERS["byte_level"]
    word, size = writer.text.encode("Paris").ids, writer.vocab_size
    inside = with_preamble(writer, Preamble(301))
    assert [*np.flatnonzero(~inside.allowed(size))] == [writer.eos]
    inside.extend([302, 301, *word[:-1]])
    without = with_preamble(writer, Preamble(301, 300))
    without.extend(word[:-1])
    for state in (inside, without):
        assert state.allowed(size)[word[-1]]
        assert state.is_complete_with(word[-1])
    without.extend([301])
    assert without.error is not None


def test_tokens_that_leave_the_language_are_an_error_not_a_crash():
    writer = WRITERS["byte_level"]
    state = GrammarState(writer.grammar(Constraint.regex("a")), (writer.eos,))
    state.extend(writer.text.encode("b").ids)
    assert isinstance(state.error, InternalError)
    assert state.allowed(writer.vocab_size).all()
    assert not state.is_complete_with(0)


def test_a_tokenizer_whose_tokens_are_not_bytes_is_refused_by_name():
    tokenizer = metaspace()
    with pytest.raises(InvalidRequest, match="not served for this model"):
        model_tokenizer(tokenizer.to_str(), tokenizer.get_vocab_size(), [1])

"""Constraints that cannot be compiled: said why, quickly, with little memory."""

import json
import tracemalloc

import pytest

from common.constraint import Constraint
from common.errors import InvalidRequest
from common.grammar import MAX_BYTES, byte_tokenizer, compile_grammar

BYTES = byte_tokenizer()

WRONG = [
    (Constraint.json_schema("{"), "not a JSON schema"),
    (Constraint.json_schema("[]"), "not a JSON schema"),
    (Constraint.json_schema('{"type": "foo"}'), "Invalid type: foo"),
    (Constraint.json_schema('{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    (Constraint.json_schema('{"not": {"type": "string"}}'), "not"),
    (Constraint.json_schema('{"if": {}, "then": {}}'), "if"),
    (Constraint.json_schema('{"type": "string", "format": "no-such-format"}'), "no-such-format"),
    (Constraint.json_schema('{"$ref": "http://127.0.0.1/x.json"}'), "does not fetch"),
    (Constraint.json_schema('{"$ref": "#/definitions/a"}'), "does not exist"),
    (Constraint.json_schema('{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'), "no answer"),
    (Constraint.json_schema('{"type": "integer", "minimum": 3, "maximum": 1}'), "greater than maximum"),
    (Constraint.json_schema('{"a":' * 5000 + "1" + "}" * 5000), "recursion limit"),
    (Constraint.json_schema(json.dumps({"description": "x" * MAX_BYTES})), "at most"),
    (Constraint.regex("(a"), "unclosed group"),
    (Constraint.regex("(?=a)b"), "look-ahead"),
    (Constraint.regex("[a&&b]"), "no answer"),
    (Constraint.regex("(" * 5000 + "a" + ")" * 5000), "nested"),
    (Constraint.regex("a|" * MAX_BYTES), "at most"),
    (Constraint.grammar("start: b"), "b"),
    (Constraint.grammar("start: a\na: a"), "no answer"),
    (Constraint.grammar("start: " + "(" * 5000 + '"a"' + ")" * 5000), "nested"),
    (Constraint.grammar("nothing like a grammar"), "grammar"),
]


@pytest.mark.parametrize(("constraint", "reason"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_compiled_is_said_in_a_short_line(constraint: Constraint, reason: str):
    tracemalloc.start()
    with pytest.raises(InvalidRequest, match=reason) as caught:
        compile_grammar(constraint, BYTES)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message
    assert peak < 8 * MAX_BYTES
    compile_grammar(Constraint.regex("a+"), BYTES)


def test_a_schema_of_a_thousand_properties_and_a_recursive_one_are_compiled():
    many = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(1000)}}
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    for schema in (many, {"$defs": {"node": node}, "$ref": "#/$defs/node"}):
        grammar = compile_grammar(Constraint.json_schema(json.dumps(schema)), BYTES)
        assert grammar.matcher().consume_token(ord("{"))

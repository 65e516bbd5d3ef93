"""Fields that ask for structure: one constraint to the workers, or a 400 that names the field."""

import json
from typing import Any

import pytest

from common.constraint import Constraint
from tests.support.gateway_bench import Bench

pytestmark = pytest.mark.anyio

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
OF_SCHEMA = Constraint.json_schema(TEXT)

SERVED = [
    ({"response_format": {"type": "json_object"}}, Constraint.json_schema('{"type": "object"}')),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, OF_SCHEMA),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        OF_SCHEMA,
    ),
    ({"structured_outputs": {"json": SCHEMA, "regex": None, "disable_fallback": False}}, OF_SCHEMA),
    ({"structured_outputs": {"json": TEXT}}, OF_SCHEMA),
    ({"structured_outputs": {"json_object": True}}, Constraint.json_schema('{"type": "object"}')),
    ({"structured_outputs": {"regex": "[a-z]+"}}, Constraint.regex("[a-z]+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, Constraint.choice(["a", "b"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Constraint.grammar('start: "a"')),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"guided_json": TEXT}, OF_SCHEMA),
    ({"guided_regex": "a+"}, Constraint.regex("a+")),
    ({"guided_choice": ["a"]}, Constraint.choice(["a"])),
    ({"guided_grammar": 'root ::= "a"'}, Constraint.grammar('root ::= "a"')),
    ({"json_schema": TEXT}, OF_SCHEMA),
    ({"regex": "a+"}, Constraint.regex("a+")),
    ({"ebnf": 'root ::= "a"'}, Constraint.grammar('root ::= "a"')),
    ({"response_format": {"type": "text"}, "structured_outputs": None, "guided_json": None, "regex": None}, None),
    ({"structured_outputs": {}}, None),
]


async def test_each_field_becomes_the_constraint_that_workers_get(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.gateway()
    for fields, constraint in SERVED:
        for ask in (bench.chat, bench.complete):
            response = await ask(**fields)
            assert response.status_code == 200, (fields, response.text)
            assert decode.submits[-1].sampling.constraint == constraint, fields


async def test_a_schema_that_is_too_deep_or_too_slow_is_refused_and_the_next_request_works(bench: Bench) -> None:
    decode = await bench.decode()
    await bench.gateway()
    deep = '{"items":' * 5000 + "{}" + "}" * 5000
    for fields, param in (
        ({"guided_json": deep}, "guided_json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}}, "response_format"),
        ({"structured_outputs": {"regex": "(" * 5000 + ")" * 5000}}, "structured_outputs"),
        ({"guided_choice": ["x" * 200_000]}, "guided_choice"),
    ):
        for stream in (False, True):
            response = await bench.chat(**fields, stream=stream)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
            assert len(response.content) < 1024
    assert decode.submits == []
    assert (await bench.chat(structured_outputs={"choice": ["a"]})).status_code == 200

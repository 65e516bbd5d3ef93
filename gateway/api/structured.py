"""What a request asks its answer to look like, in OpenAI's, vLLM's or SGLang's fields, as one constraint.

Only reads the fields; :class:`gateway.text.grammar_checker.GrammarChecker` finds out whether what they hold can be
compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from common.constraint import Constraint
from common.errors import InvalidRequest
from common.grammar import ANY_OBJECT

MAX_NAME_LENGTH = 64

_NULL = msgspec.Raw(b"null")


def _null() -> msgspec.Raw:
    """Return the value of a field that was left out."""
    return _NULL


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """``response_format.json_schema``. The schema holds exactly, whether ``strict`` is asked for or not."""

    name: str
    schema: msgspec.Raw = msgspec.field(default_factory=_null)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """``response_format``."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``structured_outputs``; those after ``grammar`` are known and not served."""

    json: msgspec.Raw = msgspec.field(default_factory=_null)
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw = msgspec.field(default_factory=_null)
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that say what the answer must look like."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.field(default_factory=_null)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: msgspec.Raw = msgspec.field(default_factory=_null)
    regex: str | None = None
    ebnf: str | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """What was asked for, and the field that did."""

    constraint: Constraint
    param: str


def structure_of(fields: StructuredFields) -> Structure | None:
    """Return what ``fields`` ask for, if anything; raises InvalidRequest when it is not served or asked for twice."""
    asked = [*_response_format(fields.response_format), *_structured_outputs(fields.structured_outputs)]
    for name, read in _FLAT.items():
        if (value := getattr(fields, name)) is not None and (constraint := read(value, name)) is not None:
            asked.append(Structure(constraint, name))
    if len(asked) > 1:
        raise InvalidRequest(
            f"{asked[1].param} asks for a structure, and so does {asked[0].param}; one is served", param=asked[1].param
        )
    return asked[0] if asked else None


def _response_format(asked: ResponseFormat | None) -> list[Structure]:
    name = "response_format"
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [Structure(Constraint.json_schema(ANY_OBJECT), name)]
    if asked.type != "json_schema":
        raise InvalidRequest(f"{name}.type must be text, json_object or json_schema", param=name)
    constraint = None if asked.json_schema is None else _schema(asked.json_schema.schema, name)
    if asked.json_schema is None or constraint is None:
        raise InvalidRequest(f"{name} needs json_schema with a name and a schema", param=name)
    if not 0 < len(asked.json_schema.name) <= MAX_NAME_LENGTH:
        raise InvalidRequest(f"{name}.json_schema.name must have 1 to {MAX_NAME_LENGTH} characters", param=name)
    return [Structure(constraint, name)]


def _structured_outputs(asked: StructuredOutputs | None) -> list[Structure]:
    if asked is None:
        return []
    for name in _NOT_SERVED:
        if (value := getattr(asked, name)) and value != _NULL:
            raise InvalidRequest(f"structured_outputs.{name} is not supported", param="structured_outputs")
    found = [] if not asked.json_object else [Constraint.json_schema(ANY_OBJECT)]
    for name, read in _NESTED.items():
        if (value := getattr(asked, name)) is not None:
            constraint = read(value, "structured_outputs")
            found += [constraint] if constraint is not None else []
    return [Structure(constraint, "structured_outputs") for constraint in found]


def _schema(raw: msgspec.Raw, param: str) -> Constraint | None:
    """Return the constraint of a schema, which clients give as JSON or as a string of JSON; None for null."""
    text = bytes(raw)
    if text == b"null":
        return None
    return Constraint.json_schema(msgspec.json.decode(text) if text.startswith(b'"') else text.decode())


def _regex(pattern: str, param: str) -> Constraint:
    return Constraint.regex(pattern)


def _choice(options: list[str], param: str) -> Constraint:
    if not options:
        raise InvalidRequest(f"{param} must give at least one choice", param=param)
    return Constraint.choice(options)


def _grammar(text: str, param: str) -> Constraint:
    return Constraint.grammar(text)


_Reader: TypeAlias = Callable[..., Constraint | None]

_NOT_SERVED = (
    "structural_tag",
    "whitespace_pattern",
    "disable_fallback",
    "disable_any_whitespace",
    "disable_additional_properties",
)
_NESTED: dict[str, _Reader] = {"json": _schema, "regex": _regex, "choice": _choice, "grammar": _grammar}
_FLAT: dict[str, _Reader] = {
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _grammar,
}

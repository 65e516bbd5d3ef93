"""What an answer must look like: a JSON schema, a regular expression, a choice, or a grammar.

It travels with the sampling parameters, as text. Knows nothing of tokens; :mod:`common.grammar` compiles it.
"""

import enum
from collections.abc import Sequence
from typing import Any

import msgspec


class ConstraintKind(enum.StrEnum):
    """How the text of a constraint is to be read."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"  # a regular expression that the whole answer matches
    CHOICE = "choice"  # a JSON array of strings, of which the answer is one
    GRAMMAR = "grammar"  # a grammar in Lark form, with a rule named "start"


class Preamble(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Free text before what is constrained: what a model thinks before it answers."""

    end: int
    """The token that ends it, which belongs to it."""
    start: int | None = None
    """The token that begins it; another first token means that there is none. None: the answer begins inside."""


class Constraint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The language that an answer must be in. Equal constraints are compiled once."""

    kind: ConstraintKind
    text: str
    preamble: Preamble | None = None

    @classmethod
    def json_schema(cls, schema: str) -> "Constraint":
        """The answer is a JSON value that ``schema``, a schema as JSON text, allows; its properties keep their order.

        ``'{"type": "object"}'`` is any JSON object.
        """
        return cls(ConstraintKind.JSON, schema)

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """The whole answer matches ``pattern``."""
        return cls(ConstraintKind.REGEX, pattern)

    @classmethod
    def choice(cls, options: Sequence[str]) -> "Constraint":
        """The answer is one of ``options``."""
        return cls(ConstraintKind.CHOICE, msgspec.json.encode(options).decode())

    @classmethod
    def grammar(cls, lark: str) -> "Constraint":
        """The answer is in the language of ``lark``.

        Inside a rule, :func:`json_rule` is a JSON value, and ``<|name|>`` a special token.
        """
        return cls(ConstraintKind.GRAMMAR, lark)


JSON_OPTIONS: Any = {
    "whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,20}",
    "whitespace_flexible": True,
    "lenient": False,
    "coerce_one_of": False,
}
"""How JSON is written: between its parts nothing, a space, or a line break and what indents the next line, since a
small model may write white space for ever. Keywords that cannot be enforced are errors."""


def json_rule(schema: str) -> str:
    """Return the part of a Lark rule that is a JSON value which ``schema``, the text of a JSON object, allows."""
    options = msgspec.json.encode(JSON_OPTIONS).decode()
    rest = schema.strip().removeprefix("{").lstrip()
    return f'%json {{"x-guidance": {options}{"" if rest.startswith("}") else ", "}{rest}'

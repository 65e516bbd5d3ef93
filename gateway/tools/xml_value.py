"""One value of a call that is written as XML, ``<parameter=city>\\nParis\\n</parameter>``, as JSON text.

XML has no types, so the tool's schema says what the text stands for. A value that may be a string is one; another is
what it says as JSON, or as Python writes it, and a string when it says nothing of the kind.
"""

import ast
import json
from typing import Any


def takes_string(schema: Any) -> bool:
    """Say whether a value under ``schema`` may be a string; without a schema, or one that leaves it open, it may."""
    if not isinstance(schema, dict):
        return True
    if "type" in schema:
        types = schema["type"]
        return types == "string" or (isinstance(types, list) and "string" in types)
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            return any(takes_string(choice) for choice in schema[key])
    if isinstance(schema.get("enum"), list):
        return any(isinstance(value, str) for value in schema["enum"])
    return True


def typed_value(text: str) -> str:
    """Return the JSON text of a value that is not to be a string."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _from_python(text)
    return text


def string_piece(text: str) -> str:
    """Return a piece of a string as it stands between the quotes of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _from_python(text: str) -> str:
    """Return as JSON what ``text`` says in Python, or that it is a string."""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")

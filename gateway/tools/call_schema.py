"""The JSON schema that an answer must fit when ``tool_choice`` demands a call. Pure."""

from collections.abc import Sequence
from typing import Any

from gateway.tools.tool import Tool


def named_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of an answer that is the arguments of ``tool``."""
    return tool.parameters or {"type": "object"}


def required_schema(tools: Sequence[Tool], *, parallel: bool) -> dict[str, Any]:
    """Return the schema of an answer that is an array of calls, one or more, or exactly one without ``parallel``."""
    calls = [_call(tool) for tool in tools]
    item = calls[0] if len(calls) == 1 else {"anyOf": calls}
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": item}
    return schema if parallel else schema | {"maxItems": 1}


def _call(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "const": tool.name}, "parameters": named_schema(tool)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }

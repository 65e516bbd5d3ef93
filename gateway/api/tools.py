"""``tools`` and ``tool_choice`` as clients send them, their bounds, and what they become."""

import re
from typing import Any, Literal

import msgspec

from common.constraint import Constraint
from common.errors import InvalidRequest
from gateway.api.structured import Structure
from gateway.bounds import Bounds, check_length
from gateway.text.json_values import depth_exceeds
from gateway.tools.call_schema import named_schema, required_schema
from gateway.tools.tool import ChoiceKind, Tool, ToolUse

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class FunctionField(msgspec.Struct, frozen=True):
    """A function that is offered."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted: arguments always fit ``parameters`` where a call is demanded, and are the model's own otherwise."""


class ToolField(msgspec.Struct, frozen=True):
    """One entry of ``tools``."""

    type: str
    function: FunctionField


class NamedFunction(msgspec.Struct, frozen=True):
    """The function that must be called."""

    name: str


class NamedChoice(msgspec.Struct, frozen=True):
    """``tool_choice`` as an object."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedChoice

_KINDS = {"none": ChoiceKind.NONE, "auto": ChoiceKind.AUTO, "required": ChoiceKind.REQUIRED}


def tool_use(
    tools: list[ToolField] | None, choice: ToolChoice | None, parallel: bool | None, bounds: Bounds
) -> ToolUse:
    """Return what a request asks of its tools; raises InvalidRequest."""
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        return ToolUse()
    if not tools:
        raise InvalidRequest("tools must not be empty", param="tools")
    check_length("tools", tools, bounds.max_tools)
    offered = tuple(_tool(n, tool, bounds) for n, tool in enumerate(tools))
    by_name = {tool.name: tool for tool in offered}
    if len(by_name) < len(offered):
        raise InvalidRequest("tools has two functions of the same name", param="tools")
    if not isinstance(choice, NamedChoice):
        return ToolUse(_KINDS[choice or "auto"], offered, parallel=parallel is not False)
    if choice.function.name not in by_name:
        raise InvalidRequest(f"tool_choice names {choice.function.name[:100]!r}, which is no tool", param="tool_choice")
    return ToolUse(ChoiceKind.NAMED, offered, by_name[choice.function.name], parallel=False)


def _tool(n: int, tool: ToolField, bounds: Bounds) -> Tool:
    if tool.type != "function":
        raise InvalidRequest(f"tools[{n}] has a type that is not function", param="tools")
    function = tool.function
    if not _NAME.fullmatch(function.name):
        raise InvalidRequest(
            f"tools[{n}] needs a name of 1 to 128 letters, digits, dots, dashes and underscores", param="tools"
        )
    if depth_exceeds(function.parameters, bounds.max_schema_depth):
        raise InvalidRequest(
            f"tools[{n}] has parameters nested more than {bounds.max_schema_depth} deep", param="tools"
        )
    return Tool(function.name, function.description, function.parameters)


def call_structure(use: ToolUse) -> Structure | None:
    """Return what an answer must look like in which a call is demanded, None where none is."""
    match use.kind:
        case ChoiceKind.NAMED:
            assert use.named is not None
            schema = named_schema(use.named)
        case ChoiceKind.REQUIRED:
            schema = required_schema(use.tools, parallel=use.parallel)
        case _:
            return None
    return Structure(Constraint.json_schema(msgspec.json.encode(schema).decode()), "tools")

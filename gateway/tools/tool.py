"""A tool as a client offers it, and what a client may demand of the model."""

import enum
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may ask the client to call."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    """JSON schema of its arguments; None: none."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as chat templates expect it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class ChoiceKind(enum.Enum):
    """What the model is to do with the tools."""

    NONE = enum.auto()  # there are none, or it must not call one
    AUTO = enum.auto()  # as it likes
    REQUIRED = enum.auto()  # call at least one
    NAMED = enum.auto()  # call this one


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request."""

    kind: ChoiceKind = ChoiceKind.NONE
    tools: tuple[Tool, ...] = ()
    named: Tool | None = None
    """The tool that must be called, with NAMED."""
    parallel: bool = True
    """Whether one answer may hold several calls."""

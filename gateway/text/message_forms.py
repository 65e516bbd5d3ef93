"""How the served model writes reasoning and calls: told by the operator, or seen in the chat template.

Made once for the model's own template, and anew for a template that a request brings.
"""

from collections.abc import Callable
from dataclasses import dataclass

from common.constraint import Constraint
from common.errors import InvalidRequest
from gateway.config import GatewayConfig
from gateway.text import thinking
from gateway.text.message_stream import MessageStream
from gateway.text.reasoning import Reasoning
from gateway.tools.call_ids import new_call_id, new_short_call_id
from gateway.tools.forced import NamedForm, RequiredForm
from gateway.tools.forms import KINDS, FormName, form_of_template
from gateway.tools.parts import ToolForm
from gateway.tools.tool import ChoiceKind, ToolUse


@dataclass(frozen=True, slots=True)
class MessageForms:
    """What one chat template has the model write."""

    tool_form: FormName | None
    """None: calls are not understood."""
    thinks: bool

    @classmethod
    def of(cls, config: GatewayConfig, template: str) -> "MessageForms":
        """Return the forms of a chat template under the gateway's options."""
        by_template = config.tool_parser == "auto"
        tool_form = form_of_template(template) if by_template else _form_named(config.tool_parser)
        thinks = thinking.OPEN in template if config.reasoning_parser == "auto" else config.reasoning_parser == "think"
        return cls(tool_form, thinks)

    def check(self, use: ToolUse) -> None:
        """Raise InvalidRequest when what the request asks of its tools cannot be had."""
        if use.kind is ChoiceKind.AUTO and self.tool_form is None:
            raise InvalidRequest(
                "the model's chat template shows no form of tool calls that is known here; the gateway's --tool-parser "
                "can name one",
                param="tools",
            )

    def shown_tokens(self, use: ToolUse) -> frozenset[str]:
        """Return the special tokens that must come out as text, since they mark reasoning or calls."""
        marks = set(thinking.MARKS if self.thinks else ())
        if use.kind is ChoiceKind.AUTO and self.tool_form is not None:
            marks.update(KINDS[self.tool_form].marks)
        return frozenset(marks)

    def streams(
        self, use: ToolUse, reasoning: Reasoning | None, constraint: Constraint | None
    ) -> Callable[[], MessageStream] | None:
        """Return what makes the reader of each answer, or None when its text is all there is to it."""
        thinks = reasoning is not None and reasoning.reader(constraint) is not None
        if not thinks and use.kind is ChoiceKind.NONE:
            return None
        new_id = new_short_call_id if self.tool_form is FormName.MISTRAL else new_call_id

        def make() -> MessageStream:
            think = None if reasoning is None else reasoning.reader(constraint)
            return MessageStream(think, self._reader(use), new_id, parallel=use.parallel)

        return make

    def _reader(self, use: ToolUse) -> ToolForm | None:
        match use.kind:
            case ChoiceKind.REQUIRED:
                return RequiredForm()
            case ChoiceKind.NAMED:
                assert use.named is not None
                return NamedForm(use.named.name)
            case ChoiceKind.AUTO:
                assert self.tool_form is not None
                return KINDS[self.tool_form].make(use.tools)
        return None


def _form_named(name: str) -> FormName | None:
    return None if name == "none" else FormName(name)

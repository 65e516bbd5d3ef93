"""Which form a model writes its calls in, as its chat template or the operator says."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.tools import hermes, llama3, mistral, xml
from gateway.tools.parts import ToolForm
from gateway.tools.tool import Tool


class FormName(enum.StrEnum):
    """The forms, as ``--tool-parser`` names them."""

    HERMES = "hermes"  # Hermes, Qwen
    XML = "xml"  # Qwen3-Coder
    LLAMA3 = "llama3"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class FormKind:
    """What has to be known of a form before an answer begins."""

    make: Callable[[Sequence[Tool]], ToolForm]
    """Makes a reader for one answer, from the tools that were offered."""
    marks: tuple[str, ...]
    """Texts that must come out of the detokenizer even where they are special tokens."""
    sign: str
    """A chat template that holds this teaches the form."""


KINDS: Mapping[FormName, FormKind] = {
    FormName.MISTRAL: FormKind(
        lambda tools: mistral.MistralForm(), (mistral.MARKER, mistral.ARGS, mistral.CALL_ID), mistral.MARKER
    ),
    FormName.XML: FormKind(xml.XmlForm, xml.MARKERS, xml.FUNCTION),
    FormName.HERMES: FormKind(lambda tools: hermes.HermesForm(), hermes.MARKERS, hermes.OPEN),
    FormName.LLAMA3: FormKind(
        lambda tools: llama3.Llama3Form(frozenset(tool.name for tool in tools)), (llama3.PYTHON_TAG,), '"parameters"'
    ),
}
"""In the order in which their signs are looked for."""


def form_of_template(chat_template: str) -> FormName | None:
    """Return the form that a chat template teaches, or None when it knows no tools or teaches a form of its own."""
    if "tools" not in chat_template:
        return None
    return next((name for name, kind in KINDS.items() if kind.sign in chat_template), None)

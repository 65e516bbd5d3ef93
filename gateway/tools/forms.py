"""Which form a model writes its calls in, as its chat template or the operator says."""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.tools import hermes, llama3, mistral
from gateway.tools.parts import ToolForm


class FormName(enum.StrEnum):
    """The forms, as ``--tool-parser`` names them."""

    HERMES = "hermes"  # Hermes, Qwen
    LLAMA3 = "llama3"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class FormKind:
    """What has to be known of a form before an answer begins."""

    make: Callable[[frozenset[str]], ToolForm]
    """Makes a reader for one answer; its argument are the names of the tools that were offered."""
    marks: tuple[str, ...]
    """Texts that must come out of the detokenizer even where they are special tokens."""
    sign: str
    """A chat template that holds this teaches the form."""


KINDS: Mapping[FormName, FormKind] = {
    FormName.MISTRAL: FormKind(
        lambda names: mistral.MistralForm(), (mistral.MARKER, mistral.ARGS, mistral.CALL_ID), mistral.MARKER
    ),
    FormName.HERMES: FormKind(lambda names: hermes.HermesForm(), hermes.MARKERS, hermes.OPEN),
    FormName.LLAMA3: FormKind(llama3.Llama3Form, (llama3.PYTHON_TAG,), '"parameters"'),
}


XML_SIGN = "<function="
"""A chat template that holds this teaches calls as XML, which no form here reads."""


def form_of_template(chat_template: str) -> FormName | None:
    """Return the form that a chat template teaches, or None when it knows no tools or teaches a form of its own."""
    if "tools" not in chat_template or XML_SIGN in chat_template:
        return None
    return next((name for name, kind in KINDS.items() if kind.sign in chat_template), None)

"""The grammars that a worker's sequences follow: each compiled once, on a thread, and kept while it is asked for."""

import asyncio
from collections import OrderedDict

import llguidance

from common.constraint import Constraint
from common.errors import BatonError, InvalidRequest
from common.grammar import Grammar, compile_grammar, model_tokenizer
from common.model.load import model_directory
from common.model.spec import ModelSpec

MAX_KEPT = 64
"""Grammars that are kept; the one that was asked for longest ago goes first."""


class Grammars:
    """Used on the event loop, which waits for nothing but its turn: one grammar is compiled at a time.

    ``tokenizer`` is the model's, or says why there is none.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer | BatonError) -> None:
        self._tokenizer = tokenizer
        self._kept: OrderedDict[Constraint, Grammar] = OrderedDict()
        self._turn = asyncio.Lock()

    async def get(self, constraint: Constraint) -> Grammar:
        """Return the grammar of ``constraint``; raises InvalidRequest when there cannot be one."""
        if isinstance(self._tokenizer, BatonError):
            raise self._tokenizer
        async with self._turn:
            if constraint not in self._kept:
                self._kept[constraint] = await asyncio.to_thread(compile_grammar, constraint, self._tokenizer)
            self._kept.move_to_end(constraint)
            grammar = self._kept[constraint]
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return grammar


def grammars_of(source: str, spec: ModelSpec) -> Grammars:
    """Return the grammars of the model at ``source``; holds the interpreter's lock for a second or two."""
    try:
        tokenizer_json = (model_directory(source) / "tokenizer.json").read_text(encoding="utf-8")
        return Grammars(model_tokenizer(tokenizer_json, spec.vocab_size, spec.eos_token_ids))
    except OSError:
        return Grammars(InvalidRequest("structured output is not served for this model: it has no tokenizer.json"))
    except InvalidRequest as error:
        return Grammars(error)

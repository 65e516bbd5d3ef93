"""Constraints compiled to automata over a tokenizer's tokens, within limits (llguidance; an Earley parser over a lexer
of regular-expression derivatives).

The gateway compiles a constraint over bytes, to refuse a bad one before anything is sent; workers compile it over the
model's tokens. Never loads torch. Compiling may take a second, without the interpreter's lock: call it on a thread.
"""

from collections.abc import Sequence

import llguidance
import msgspec
from llguidance.gbnf_to_lark import any_to_lark

from common.constraint import JSON_OPTIONS, Constraint, ConstraintKind, Preamble
from common.errors import InvalidRequest

MAX_BYTES = 128 * 1024
"""No constraint may be longer."""

MAX_ECHO = 200
"""Characters of the compiler's message in an error."""

ANY_OBJECT = '{"type": "object"}'
"""Schema of any JSON object."""

_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    max_items_in_row=20_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""Steps of the compiler, by which time and memory are bounded: of one mask to some 20 ms, of a lexer to 40 MB."""


class Grammar:
    """One compiled constraint. Immutable: each sequence takes its own matcher."""

    def __init__(
        self, start: llguidance.LLMatcher, eos_token_ids: Sequence[int], preamble: Preamble | None = None
    ) -> None:
        self.preamble = preamble
        """What may come before it."""
        self.eos_token_ids = tuple(eos_token_ids)
        """Tokens that it allows where an answer may end."""
        self._start = start

    def matcher(self) -> llguidance.LLMatcher:
        """Return a new matcher, at the beginning of an answer."""
        return self._start.deep_copy()


def compile_grammar(constraint: Constraint, tokenizer: llguidance.LLTokenizer) -> Grammar:
    """Compile ``constraint``; raises InvalidRequest, which says why, when it is wrong, unsupported or over a limit."""
    num_bytes = len(constraint.text.encode())
    if num_bytes > MAX_BYTES:
        raise InvalidRequest(f"has {num_bytes} bytes; at most {MAX_BYTES} are compiled")
    matcher = llguidance.LLMatcher(tokenizer, _source(constraint), log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise InvalidRequest(f"cannot be compiled: {_brief(matcher.get_error())}")
    is_empty = not any(matcher.compute_bitmask())
    if is_empty or matcher.is_error():
        raise InvalidRequest("allows no answer, or is too complex")
    return Grammar(matcher, tokenizer.eos_tokens, constraint.preamble)


def model_tokenizer(tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """Return a model's tokenizer. Takes a second or two and holds the interpreter's lock: do it while loading.

    Raises InvalidRequest when the tokens of such a tokenizer do not stand for bytes.
    """
    try:
        return llguidance.LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None)
    except ValueError as error:
        raise InvalidRequest(f"structured output is not served for this model: {_brief(str(error))}") from error


def byte_tokenizer(special_tokens: Sequence[str] = ()) -> llguidance.LLTokenizer:
    """Return a tokenizer of single bytes and ``special_tokens``, by which constraints are checked without a model."""
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes(special_tokens)))


class _Bytes:
    bos_token_id = None

    def __init__(self, special_tokens: Sequence[str]) -> None:
        names = [name.encode() for name in special_tokens]
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *names]
        self.eos_token_id = 256
        self.special_token_ids = list(range(256, len(self.tokens)))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _source(constraint: Constraint) -> str:
    """Return ``constraint`` in llguidance's own form; raises InvalidRequest."""
    matcher, text = llguidance.LLMatcher, constraint.text
    match constraint.kind:
        case ConstraintKind.JSON:
            try:
                return matcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            except ValueError as error:
                raise InvalidRequest(f"is not a JSON schema: {_brief(str(error))}") from error
        case ConstraintKind.REGEX:
            return matcher.grammar_from_regex(text)
        case ConstraintKind.CHOICE:
            options = msgspec.json.decode(text, type=list[str])
            return matcher.grammar_from_lark("start: " + " | ".join(map(_literal, options)))
        case ConstraintKind.GRAMMAR:
            return matcher.grammar_from_lark(_lark(text))


def _literal(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _lark(text: str) -> str:
    """Return a grammar in Lark form; GBNF, as llama.cpp has it, is translated."""
    try:
        return any_to_lark(text)
    except Exception as error:  # the translator raises plain Exception
        raise InvalidRequest(f"cannot be read as a grammar: {_brief(str(error))}") from error


def _brief(message: str) -> str:
    """Return what went wrong, in one short line; of a wrong regular expression not the expression."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (causes[0] if causes else " ".join(lines))[:MAX_ECHO]

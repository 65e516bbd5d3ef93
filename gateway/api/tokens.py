"""``POST /tokenize`` and ``POST /detokenize``, as vLLM has them: text to the model's tokens, and back."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from common.errors import InvalidRequest
from gateway.api import chat
from gateway.api.body import read_json_body
from gateway.api.completions import check_tokens
from gateway.api.fields import decode
from gateway.api.model_name import check_model
from gateway.api.tools import ToolField, tool_use
from gateway.parts import Parts, parts_of


class TokenizeFields(msgspec.Struct, frozen=True):
    """What to tokenise: one of ``prompt`` and ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[chat.Message] | None = None
    tools: list[ToolField] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    """Of a prompt; true if left out. In a chat the template writes them."""
    return_token_strs: bool | None = None


class TokenizeReply(msgspec.Struct, frozen=True):
    """The tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeFields(msgspec.Struct, frozen=True):
    """The tokens to write as text."""

    tokens: list[int]
    model: str | None = None


class DetokenizeReply(msgspec.Struct, frozen=True):
    """The text, special tokens included."""

    prompt: str


_TOKENIZE = msgspec.json.Decoder(TokenizeFields)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeFields)


async def tokenize(request: Request) -> Response:
    """Return the tokens of a prompt or of a conversation."""
    parts = parts_of(request)
    fields = decode(await read_json_body(request, parts.config.max_body_bytes), _TOKENIZE)
    check_model(parts.config, fields.model)
    limit = parts.services.cluster.max_model_len()
    token_ids = await _tokens(parts, fields, limit)
    texts = parts.tokenizer.token_texts(token_ids) if fields.return_token_strs else UNSET
    return _json(TokenizeReply(len(token_ids), limit, token_ids, texts))


async def detokenize(request: Request) -> Response:
    """Return the text of tokens."""
    parts = parts_of(request)
    fields = decode(await read_json_body(request, parts.config.max_body_bytes), _DETOKENIZE)
    check_model(parts.config, fields.model)
    if fields.tokens:
        check_tokens(fields.tokens, parts.tokenizer.vocab_size, "tokens")
    return _json(DetokenizeReply(await parts.tokenizer.decode(fields.tokens)))


async def _tokens(parts: Parts, fields: TokenizeFields, limit: int) -> list[int]:
    if (fields.messages is None) == (fields.prompt is None):
        raise InvalidRequest("exactly one of messages and prompt must be given", param="prompt")
    if fields.prompt is not None:
        adds_special = fields.add_special_tokens is not False
        return await parts.tokenizer.encode_prompt(fields.prompt, limit, adds_special=adds_special)
    assert fields.messages is not None
    use = tool_use(fields.tools, None, None, parts.config)
    prompt = chat.chat_prompt(fields.messages, use, fields.chat_template_kwargs, parts.config)
    return await parts.tokenizer.encode_chat_prompt(prompt, limit)


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")

"""``POST /v1/chat/completions`` and ``POST /v1/completions``: from bytes to a running generation."""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from common.sampling import SamplingParams
from gateway.admission import Ticket
from gateway.api import chat, completions
from gateway.api.answer import respond
from gateway.api.body import read_json_body
from gateway.api.chat_reply import ChatReply
from gateway.api.completion_reply import CompletionReply
from gateway.api.fields import CommonFields, ModelTokens, sampling_params
from gateway.api.reply import ReplyHead
from gateway.api.salt import salt_of
from gateway.errors import ModelNotFound
from gateway.generation import Generation, Job
from gateway.parts import Parts, parts_of
from gateway.text_stream import NoText, TextStream


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    parts, arrived_at = parts_of(request), asyncio.get_running_loop().time()
    ticket = parts.admission.enter()
    try:
        fields = chat.parse(await read_json_body(request, parts.config.max_body_bytes))
        _check_model(parts, fields)
        ticket.extend(fields.num_samples - 1)
        messages = chat.conversation(fields)
        limit = parts.services.cluster.max_model_len()
        prompts = [await parts.tokenizer.encode_chat(messages, limit)]
        generation = _generation(request, fields, prompts, limit, ticket, arrived_at, continues=False)
    except BaseException:
        ticket.release()
        raise
    writer = ChatReply(_head("chatcmpl", parts, fields, generation))
    return await respond(generation, writer, fields, parts.config, parts.metrics, request.receive)


async def text_completions(request: Request) -> Response:
    """Continue one or several prompts."""
    parts, arrived_at = parts_of(request), asyncio.get_running_loop().time()
    ticket = parts.admission.enter()
    try:
        fields = completions.parse(await read_json_body(request, parts.config.max_body_bytes))
        _check_model(parts, fields)
        given = completions.prompts(fields, parts.tokenizer.vocab_size)
        ticket.extend(len(given) * fields.num_samples - 1)
        limit = parts.services.cluster.max_model_len()
        prompts = [await _tokens(parts, prompt, limit) for prompt in given]
        generation = _generation(request, fields, prompts, limit, ticket, arrived_at, continues=True)
    except BaseException:
        ticket.release()
        raise
    echo = None
    if fields.echo:
        texts = [parts.tokenizer.text_of(prompt) if isinstance(prompt, list) else prompt for prompt in given]
        echo = [text for text in texts for _ in range(fields.num_choices)]
    writer = CompletionReply(_head("cmpl", parts, fields, generation), echo)
    return await respond(generation, writer, fields, parts.config, parts.metrics, request.receive)


def _check_model(parts: Parts, fields: CommonFields) -> None:
    if fields.model is not None and fields.model not in (parts.config.model_name, parts.config.model):
        raise ModelNotFound(
            f"the model {fields.model[:100]!r} is not served here; {parts.config.model_name!r} is", param="model"
        )


async def _tokens(parts: Parts, prompt: completions.Prompt, limit: int) -> list[int]:
    return await parts.tokenizer.encode_prompt(prompt, limit) if isinstance(prompt, str) else prompt


def _generation(
    request: Request,
    fields: CommonFields,
    prompts: Sequence[list[int]],
    limit: int,
    ticket: Ticket,
    arrived_at: float,
    *,
    continues: bool,
) -> Generation:
    parts = parts_of(request)
    tokenizer, stop = parts.tokenizer, fields.stop_strings()

    def make_text(sampling: SamplingParams) -> TextStream | NoText:
        if fields.token_limit() == 0:
            return NoText()
        return TextStream(
            tokenizer.detokenizer(continues=continues),
            stop,
            sampling,
            includes_stop=bool(fields.include_stop_str_in_output),
        )

    model_tokens = ModelTokens(
        tokenizer.eos_token_ids, tokenizer.vocab_size, tokenizer.encode_words(fields.bad_words or ())
    )

    jobs = [
        Job(tuple(prompt), sampling_params(fields, len(prompt), limit, model_tokens), fields.num_samples)
        for prompt in prompts
    ]
    sizes = [(len(job.prompt), job.sampling.max_tokens, job.num_samples) for job in jobs]
    parts.admission.check_capacity(parts.services.cluster, sizes)
    return Generation(
        parts.services,
        jobs,
        make_text,
        ticket,
        parts.admission.backlog,
        parts.running,
        arrived_at=arrived_at,
        timeout_s=parts.config.request_timeout_s,
        cache_salt=salt_of(request, fields.cache_salt),
    )


def _head(prefix: str, parts: Parts, fields: CommonFields, generation: Generation) -> ReplyHead:
    texts = parts.tokenizer.token_texts
    return ReplyHead.new(prefix, parts.config.model_name, texts, fields, generation.prompts)

"""``POST /v1/chat/completions`` and ``POST /v1/completions``: from bytes to a running generation."""

import asyncio
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from common.constraint import Constraint
from common.errors import InvalidRequest
from gateway.admission import Ticket
from gateway.api import chat, completions
from gateway.api.answer import respond
from gateway.api.body import read_json_body
from gateway.api.chat_reply import ChatReply
from gateway.api.completion_reply import CompletionReply
from gateway.api.fields import CommonFields, ModelTokens, sampling_params
from gateway.api.model_name import check_model
from gateway.api.reply import ReplyHead
from gateway.api.structured import Structure, structure_of
from gateway.api.tools import call_structure, tool_use
from gateway.http.salt import salt_of
from gateway.parts import Parts, parts_of
from gateway.request.generation import Generation, Job
from gateway.text.message_forms import MessageForms
from gateway.text.reasoning import Reasoning
from gateway.text.text_stream import NoText, TextStream


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    parts, arrived_at = parts_of(request), asyncio.get_running_loop().time()
    ticket = parts.admission.enter()
    try:
        fields = chat.parse(await read_json_body(request, parts.config.max_body_bytes), parts.config)
        check_model(parts.config, fields.model)
        ticket.extend(fields.num_samples - 1)
        forms = _forms(parts, fields)
        use = tool_use(fields.tools, fields.tool_choice, fields.parallel_tool_calls, parts.config)
        forms.check(use)
        prompt = chat.chat_prompt(fields.messages, use, fields.chat_template_kwargs, parts.config)
        limit = await parts.services.cluster.wait_max_model_len(parts.config.worker_wait_s)
        token_ids = await parts.tokenizer.encode_chat_prompt(prompt, limit, fields.chat_template)
        reasoning = Reasoning.after(token_ids, parts.tokenizer) if forms.thinks else None
        constraint = await _constraint(parts, fields, call_structure(use))
        if constraint is not None and reasoning is not None:
            constraint = reasoning.before(constraint)
        generation = _generation(
            request,
            fields,
            [token_ids],
            limit,
            ticket,
            arrived_at,
            constraint,
            continues=False,
            shown=forms.shown_tokens(use),
        )
    except BaseException:
        ticket.release()
        raise
    make_stream = forms.streams(use, reasoning, constraint)
    writer = ChatReply(_head("chatcmpl", parts, fields, generation), make_stream, is_named=use.named is not None)
    return await respond(generation, writer, fields, parts.config, parts.metrics, request.receive)


async def text_completions(request: Request) -> Response:
    """Continue one or several prompts."""
    parts, arrived_at = parts_of(request), asyncio.get_running_loop().time()
    ticket = parts.admission.enter()
    try:
        fields = completions.parse(await read_json_body(request, parts.config.max_body_bytes), parts.config)
        check_model(parts.config, fields.model)
        given = completions.prompts(fields, parts.tokenizer.vocab_size, parts.config)
        ticket.extend(len(given) * fields.num_samples - 1)
        limit = await parts.services.cluster.wait_max_model_len(parts.config.worker_wait_s)
        prompts = [await _tokens(parts, prompt, limit) for prompt in given]
        constraint = await _constraint(parts, fields)
        generation = _generation(request, fields, prompts, limit, ticket, arrived_at, constraint, continues=True)
    except BaseException:
        ticket.release()
        raise
    echo = None
    if fields.echo:
        texts = [parts.tokenizer.text_of(prompt) if isinstance(prompt, list) else prompt for prompt in given]
        echo = [text for text in texts for _ in range(fields.num_choices)]
    writer = CompletionReply(_head("cmpl", parts, fields, generation), echo)
    return await respond(generation, writer, fields, parts.config, parts.metrics, request.receive)


def _forms(parts: Parts, fields: chat.ChatFields) -> MessageForms:
    """Return how answers are read; raises InvalidRequest for a template that the operator does not trust."""
    if fields.chat_template is None:
        return parts.message_forms
    if not parts.config.trust_request_template:
        raise InvalidRequest(
            "chat_template is taken only by a gateway that was started with --trust-request-template",
            param="chat_template",
        )
    return MessageForms.of(parts.config, fields.chat_template)


async def _constraint(parts: Parts, fields: CommonFields, calls: Structure | None = None) -> Constraint | None:
    """Return what the answer must look like, maybe ``calls``; raises InvalidRequest when that cannot be enforced."""
    asked = structure_of(fields)
    if asked is not None and calls is not None:
        raise InvalidRequest(f"{asked.param} cannot be had from an answer that must be a call", param=asked.param)
    structure = asked or calls
    if structure is None:
        return None
    await parts.grammars.check(structure.constraint, structure.param)
    return structure.constraint


async def _tokens(parts: Parts, prompt: completions.Prompt, limit: int) -> list[int]:
    return await parts.tokenizer.encode_prompt(prompt, limit) if isinstance(prompt, str) else prompt


def _generation(
    request: Request,
    fields: CommonFields,
    prompts: Sequence[list[int]],
    limit: int,
    ticket: Ticket,
    arrived_at: float,
    constraint: Constraint | None,
    *,
    continues: bool,
    shown: frozenset[str] = frozenset(),
) -> Generation:
    parts = parts_of(request)
    tokenizer, stop = parts.tokenizer, fields.stop_strings()

    def make_text(job: Job) -> TextStream | NoText:
        if fields.token_limit() == 0:
            return NoText()
        return TextStream(
            tokenizer.detokenizer(continues=job.prompt if continues else None, shown=shown),
            stop,
            job.sampling,
            includes_stop=bool(fields.include_stop_str_in_output),
        )

    model_tokens = ModelTokens(
        tokenizer.eos_token_ids, tokenizer.vocab_size, tokenizer.encode_words(fields.bad_words or ())
    )

    jobs = [
        Job(tuple(prompt), sampling_params(fields, len(prompt), limit, model_tokens, constraint), fields.num_samples)
        for prompt in prompts
    ]
    sizes = [(len(job.prompt), job.sampling.max_tokens, job.num_sequences) for job in jobs]
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
    texts = parts.tokenizer.names
    return ReplyHead.new(prefix, parts.config.model_name, texts, fields, generation.prompts)

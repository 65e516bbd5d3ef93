"""Prefill and decode of a whole engine over HTTP, with as many requests at once as are asked for.

Decode is measured behind a warm prefix cache: each prompt is first sent alone, with a short answer, and then all of a
batch again at once. So the whole batch decodes together, at the context that was asked for, in every engine.
"""

from collections.abc import Iterator, Sequence

from benchmarks.peers.budget import Budget
from benchmarks.peers.figures import decode_rate, prefill_rate
from benchmarks.peers.load import Load, Observed, Request, Seen, Stream, drive
from benchmarks.peers.measurement import Part
from benchmarks.peers.names import decode_name, prefill_name
from benchmarks.peers.prompts import Prompts
from benchmarks.peers.server import Server

WARM_ANSWER = 2
"""With one token a decode worker would never need the prompt's blocks, and so not cache them."""
WARM_AT_ONCE = 4


def warm_up(server: Server, prompts: Prompts, budget: Budget) -> None:
    """Send a few requests of each length that will come."""
    lengths = (budget.chat_prompt, budget.context, budget.long_prompt, budget.chat_prompt)
    _send(server, [Request(prompts.tokens(length), 8) for length in lengths], at_once=1)


def closed_loop(server: Server, prompts: Prompts, budget: Budget, batches: Sequence[int]) -> Iterator[Part]:
    """Measure prefill at both lengths and decode at each batch size."""
    contexts = [prompts.tokens(budget.context) for _ in range(max(*batches, budget.prefills))]
    timed, rest = contexts[: budget.prefills], contexts[budget.prefills :]
    yield _prefill(server, timed)
    yield _prefill(server, [prompts.tokens(budget.long_prompt) for _ in range((budget.prefills + 1) // 2)])
    if rest:
        _send(server, [Request(prompt, WARM_ANSWER) for prompt in rest], at_once=WARM_AT_ONCE)
    for batch in batches:
        yield _decode(server, contexts[:batch], budget)


def _prefill(server: Server, prompts: Sequence[Sequence[int]]) -> Part:
    observed = _send(server, [Request(prompt, WARM_ANSWER) for prompt in prompts], at_once=1)
    answers = observed.streams[0]
    name = prefill_name(len(prompts[0]))
    if error := _first_error(answers):
        return Part(name, error=error)
    cached = max(answer.cached for answer in answers)
    return Part(name, {"tokens_per_s": prefill_rate(answers), "cached_tokens": cached}, observed.warnings)


def _decode(server: Server, prompts: Sequence[Sequence[int]], budget: Budget) -> Part:
    observed = _send(server, [Request(prompt, budget.decode_tokens) for prompt in prompts])
    answers = observed.streams[0]
    name = decode_name(len(prompts))
    if error := _first_error(answers):
        return Part(name, error=error)
    rate = decode_rate(answers)
    if not rate:
        return Part(name, error="the batch was never complete")
    cached = min(answer.cached for answer in answers)
    figures = {"tokens_per_s": rate, "cached_tokens": cached, "client_cpu_share": observed.cpu_share}
    return Part(name, figures, observed.warnings)


def _send(server: Server, requests: Sequence[Request], at_once: int = 0) -> Observed:
    return drive(Load(server.url, server.model, [Stream(requests, at_once)]))


def _first_error(answers: Sequence[Seen]) -> str:
    return next((answer.error for answer in answers if answer.error), "")

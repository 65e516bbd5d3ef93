"""Open-loop traffic, as users send it: chats at several rates, the same beside long prompts, shared prefixes.

A request that takes longer than a window is given up, and its connection closed; it is not good anyway. So an engine
that falls behind is idle again before the next part begins.
"""

from collections.abc import Callable, Iterator, Sequence

from benchmarks.peers.budget import Budget
from benchmarks.peers.figures import good_share, latencies
from benchmarks.peers.load import Load, Observed, Request, Seen, Stream, drive
from benchmarks.peers.measurement import Part
from benchmarks.peers.names import SHARED, chats_name, steady_name
from benchmarks.peers.prompts import Prompts
from benchmarks.peers.server import Server

ENDLESS = 4000
"""Tokens of an answer that outlasts every window."""


def open_loop(
    server: Server, prompts: Prompts, budget: Budget, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[Part]:
    """Measure all of it; ``meanwhile`` is called now and then while chats run."""
    for injected in (False, True):
        yield _steady(server, prompts, budget, injected)
        for rate in budget.rates:
            yield _chats(server, prompts, budget, rate, injected, meanwhile)
    yield _shared(server, prompts, budget)


def _chats(
    server: Server,
    prompts: Prompts,
    budget: Budget,
    rate: float,
    injected: bool,
    meanwhile: Callable[[], None],
) -> Part:
    observed = _send(server, prompts.chats(rate, budget), prompts, budget, injected, meanwhile)
    answers = observed.streams[0]
    figures = latencies(answers) | _outcome(answers, budget) | _long_prompts(observed)
    return Part(chats_name(rate, injected), figures, observed.warnings)


def _shared(server: Server, prompts: Prompts, budget: Budget) -> Part:
    observed = _send(server, prompts.shared_prefixes(budget), prompts, budget, injected=False)
    answers = observed.streams[0]
    asked = sum(answer.prompt_len for answer in answers)
    figures = latencies(answers) | _outcome(answers, budget)
    figures["cached_share"] = sum(answer.cached for answer in answers) / asked
    return Part(SHARED, figures, observed.warnings)


def _steady(server: Server, prompts: Prompts, budget: Budget, injected: bool) -> Part:
    """A few chats that go on for a whole window: the gaps between their tokens, once all of them have begun."""
    chats = [Request(prompts.tokens(budget.chat_prompt), ENDLESS) for _ in range(budget.steady_chats)]
    observed = _send(server, chats, prompts, budget, injected)
    answers = observed.streams[0]
    if stuck := [answer for answer in answers if not answer.itls_s]:
        return Part(steady_name(injected), error=f"{len(stuck)} of the chats had no two tokens: {stuck[0].error}")
    figures = latencies(answers) | {"longest_gap_ms": 1e3 * max(max(answer.itls_s) for answer in answers)}
    return Part(steady_name(injected), figures | _long_prompts(observed), observed.warnings)


def _send(
    server: Server,
    requests: Sequence[Request],
    prompts: Prompts,
    budget: Budget,
    injected: bool,
    meanwhile: Callable[[], None] = lambda: None,
) -> Observed:
    streams = [Stream(requests, timeout_s=budget.window_s)]
    if injected:
        streams.append(Stream(prompts.injected(budget), timeout_s=budget.window_s))
    return drive(Load(server.url, server.model, streams), meanwhile)


def _outcome(answers: Sequence[Seen], budget: Budget) -> dict[str, float]:
    done = [answer for answer in answers if not answer.error]
    seconds = max((answer.token_times_s[-1] for answer in done), default=budget.window_s)
    return {
        "requests": len(answers),
        "completed": len(done),
        "good_share": good_share(answers, budget),
        "tokens_per_s": sum(answer.answer_len for answer in done) / seconds,
    }


def _long_prompts(observed: Observed) -> dict[str, float]:
    """Return how the long prompts fared, where there were any."""
    if len(observed.streams) < 2:
        return {}
    answers = observed.streams[1]
    begun = [answer for answer in answers if answer.token_times_s]
    return {"long_prompts": len(answers), "long_prompts_begun": len(begun)} | {
        f"long_prompt_{name}": value for name, value in latencies(begun).items() if name.startswith("ttft")
    }

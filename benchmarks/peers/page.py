"""The page of one run, with its plots: date, machine, command, goals, and what they rest on."""

import json
import subprocess
from pathlib import Path

from benchmarks.peers import report
from benchmarks.peers.budget import Budget
from benchmarks.peers.environments import PLOT, NotInstalled, python_of
from benchmarks.peers.goals import shares, verdicts
from benchmarks.peers.measurement import Settings
from benchmarks.peers.names import TITLES, decode_name
from benchmarks.peers.results import Key, Results
from compose.console import note

_TEXT = """# Beside the peers

Written by `{command}` on {date}. Do not edit: `make bench` writes it.

Machine: {machine}.

SmolLM2-135M-Instruct in bfloat16, the same random prompts for every engine, one engine at a time, {rounds} rounds with
the engines in turn. Figures are medians over the rounds, ratios are medians of the ratios inside a round. Open-loop
traffic was sent, and continuous batching of transformers measured, in {open_rounds} of them.

## Goals

{goals}

A figure for which the load generator itself may have been too slow is left out, and so is every ratio with it.

## Prefill and decode

Baton and vLLM over HTTP with streaming, the others as libraries in a process, which is how they are used. Prefill:
prompt tokens by the time to the first token, one prompt at a time, none of it cached. Decode: behind {context} tokens
of context, from the moment when the whole batch has begun until the first answer ends. In these workloads only one of
Baton's two workers has work at a time, so both have as many threads as a peer has. llama.cpp's Python build writes one
sequence at a time.

{closed}
{reasons}
![Decode](peers_decode.png)

## Chats

A Poisson process of chats, {chat_prompt} tokens in and {chat_answer} out, each within half of it more or less, for
{window:g} s at each rate; a request is given up after as long. Baton has one prefill and one decode worker with one
thread each, vLLM two threads. A request is good when its first token comes within {ttft:g} ms and the mean gap between
its tokens is at most {itl:g} ms. Milliseconds.

{chats}

The same with a prompt of {injected} tokens sent every second beside them:

{injected_chats}

{goodput}

Where the time to Baton's first tokens goes, by its own metrics, long prompts included: mean milliseconds from arrival
to the prompt's first work and from there to the first token, and how many prompts the decode worker read itself (local)
or the prefill worker (remote).

{stages}

![Goodput](peers_goodput.png)

## Chats that go on

{steady_chats} chats that outlast the window, alone and beside the same long prompts. Milliseconds.

{steady}

## Shared prefixes

Requests that begin with one of {num_prefixes} prefixes of {prefix} tokens, {prefix_rate:g} a second; the prefixes are
not cached at first. Milliseconds.

{shared}

## Hand-over

Between two processes, beside no other work, as `python -m benchmarks.transfer` measures it.

{hand_over}

## Start

With the model's files in the page cache, and vLLM's compiled code in its own cache after its first start.

{starts}
"""


def write_page(path: Path, settings: Settings, results: Results, home: Path) -> None:
    """Write the page and draw its plots beside it; without matplotlib the page has none."""
    budget = settings.budget
    path.parent.mkdir(parents=True, exist_ok=True)
    text = _text(settings, results, budget)
    if not _draw(path.parent, results, budget, home):
        text = "\n".join(line for line in text.splitlines() if not line.startswith("![")) + "\n"
    path.write_text(text)
    note(f"written: {path}")


def _text(settings: Settings, results: Results, budget: Budget) -> str:
    return _TEXT.format(
        command=settings.command,
        date=settings.date,
        machine=settings.machine,
        rounds=budget.rounds,
        open_rounds=budget.open_rounds,
        goals=report.goals(verdicts(results, budget)),
        context=budget.context,
        closed=report.closed_loop(results, budget),
        reasons="".join(f"\n{line}" for line in report.reasons(results, budget)) + "\n",
        chat_prompt=budget.chat_prompt,
        chat_answer=budget.chat_answer,
        window=budget.window_s,
        ttft=budget.ttft_limit_ms,
        itl=budget.itl_limit_ms,
        chats=report.chats(results, budget, injected=False),
        injected=budget.injected_prompt,
        injected_chats=report.chats(results, budget, injected=True),
        goodput=report.goodput(results, budget),
        stages=report.stages(results, budget),
        steady_chats=budget.steady_chats,
        steady=report.steady(results),
        num_prefixes=budget.num_prefixes,
        prefix=budget.prefix,
        prefix_rate=budget.prefix_rate,
        shared=report.shared_prefixes(results),
        hand_over=report.hand_over(results, budget),
        starts=report.starts(results),
    )


def _draw(folder: Path, results: Results, budget: Budget, home: Path) -> bool:
    """Draw in the plots' own environment; return whether it could be done."""
    try:
        python = python_of(PLOT, home)
    except NotInstalled as error:
        note(f"no plots: {error}")
        return False
    script = Path(__file__).with_name("plots.py")
    data = json.dumps(_plot_data(results, budget)).encode()
    return subprocess.run((str(python), str(script), str(folder)), input=data, check=False).returncode == 0


def _plot_data(results: Results, budget: Budget) -> dict[str, object]:
    decode = {
        TITLES[engine]: [results.median(Key(engine, decode_name(batch))).value for batch in budget.batches]
        for engine in report.CLOSED
    }
    good = {
        f"{TITLES[engine]}{', beside long prompts' if injected else ''}": sorted(
            (rate, rate * share) for rate, share in shares(results, engine, budget, injected).items()
        )
        for engine in report.OPEN
        for injected in (False, True)
    }
    return {"batches": list(budget.batches), "decode": decode, "good": good}

"""Tables of one run: the goals for the terminal, all of it as Markdown. Pure but for drawing."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from benchmarks.peers.budget import Budget
from benchmarks.peers.figures import highest_rate, most_good
from benchmarks.peers.goals import Verdict, shares
from benchmarks.peers.names import (
    BATON,
    BATON_MODEL,
    BATON_SPLIT,
    CONTINUOUS,
    GENERATE,
    HAND_OVER,
    LLAMA,
    LLAMA_1T,
    SHARED,
    START,
    TITLES,
    VLLM,
    chats_name,
    decode_name,
    prefill_name,
    steady_name,
)
from benchmarks.peers.results import Key, Results

CLOSED = (BATON, BATON_SPLIT, BATON_MODEL, VLLM, LLAMA, LLAMA_1T, GENERATE, CONTINUOUS)
OPEN = (BATON_SPLIT, VLLM)
MISSING = "-"
_WORDS = {True: "met", False: "**missed**", None: "no figure"}


def goals_table(verdicts: Sequence[Verdict]) -> Table:
    """Return the goals for the terminal."""
    table = Table(title="Goals")
    for column in ("work", "goal", "figure", ""):
        table.add_column(column)
    for one in verdicts:
        table.add_row(one.work, one.goal, one.figure, _WORDS[one.met].strip("*"))
    return table


def goals(verdicts: Sequence[Verdict]) -> str:
    """Return the goals as Markdown."""
    rows = [[one.work, one.goal, one.figure, _WORDS[one.met]] for one in verdicts]
    return markdown(["work", "goal", "figure", ""], rows)


def closed_loop(results: Results, budget: Budget) -> str:
    """Return tokens a second of prefill and decode, an engine a row."""
    workloads = [prefill_name(length) for length in (budget.context, budget.long_prompt)]
    workloads += [decode_name(batch) for batch in budget.batches]
    rows = [
        [TITLES[engine], *(_cell(results, Key(engine, workload), "{:.0f}") for workload in workloads)]
        for engine in CLOSED
    ]
    return markdown(["tokens/s", *workloads], rows)


def chats(results: Results, budget: Budget, injected: bool) -> str:
    """Return latencies and goodput by rate, for both engines."""
    columns = {"TTFT p50": "ttft_p50_ms", "p99": "ttft_p99_ms", "ITL p50": "itl_p50_ms", "p99 ": "itl_p99_ms"}
    rows = []
    for rate in budget.rates:
        for engine in OPEN:
            name = chats_name(rate, injected)
            cells = [_cell(results, Key(engine, name, figure), "{:.0f}") for figure in columns.values()]
            good = _cell(results, Key(engine, name, "good_share"), "{:.0%}")
            rows.append([f"{rate:g}", TITLES[engine], *cells, good, _cell(results, Key(engine, name), "{:.0f}")])
    return markdown(["chats/s", "engine", *columns, "good", "tokens/s"], rows)


def goodput(results: Results, budget: Budget) -> str:
    """Return goodput of both engines, with and without long prompts."""
    rows = []
    for injected in (False, True):
        for engine in OPEN:
            of = shares(results, engine, budget, injected)
            cells = [f"{most_good(of):.2f}/s", f"{highest_rate(of):g}/s"] if of else [MISSING, MISSING]
            rows.append(["with" if injected else "without", TITLES[engine], *cells])
    return markdown(["long prompts", "engine", "most good requests", "highest rate with 90 % good"], rows)


def steady(results: Results) -> str:
    """Return the gaps of chats that go on."""
    rows = []
    for injected in (False, True):
        for engine in OPEN:
            figures = ("itl_p50_ms", "itl_p99_ms", "longest_gap_ms", "long_prompt_ttft_p50_ms")
            cells = [_cell(results, Key(engine, steady_name(injected), figure), "{:.0f}") for figure in figures]
            rows.append(["with" if injected else "without", TITLES[engine], *cells])
    return markdown(["long prompts", "engine", "ITL p50", "p99", "longest gap", "TTFT of the long prompts, p50"], rows)


def stages(results: Results, budget: Budget) -> str:
    """Return where Baton's first tokens wait, and which worker computes the prompts."""
    figures = {
        "waiting": "mean_queue_ms",
        "computing": "mean_prefill_ms",
        "local": "plans_local",
        "remote": "plans_remote",
    }
    workloads = [chats_name(rate, injected) for injected in (False, True) for rate in budget.rates]
    workloads += [steady_name(True), SHARED]
    rows = [
        [name, *(_cell(results, Key(BATON_SPLIT, name, figure), "{:.0f}") for figure in figures.values())]
        for name in workloads
    ]
    return markdown(["workload", *figures], rows)


def shared_prefixes(results: Results) -> str:
    """Return what a shared prefix does."""
    rows = []
    for engine in OPEN:
        cells = [_cell(results, Key(engine, SHARED, figure), "{:.0f}") for figure in ("ttft_p50_ms", "ttft_p99_ms")]
        shared = [_cell(results, Key(engine, SHARED, figure), "{:.0%}") for figure in ("cached_share", "good_share")]
        rows.append([TITLES[engine], *cells, *shared])
    return markdown(["engine", "TTFT p50", "p99", "prompt tokens cached", "good"], rows)


def hand_over(results: Results, budget: Budget) -> str:
    """Return what a hand-over costs, split into control and bytes."""
    names = ("empty_p50_ms", "empty_p99_ms", "bytes_per_token", "grpc_gb_per_s", "shared_gb_per_s")
    found = [results.median(Key(HAND_OVER, HAND_OVER, name)).value for name in names]
    median, p99, bytes_per_token, *rates = found
    rows = [["control: from Pull to End without bytes", _number(median, "{:.2f}"), _number(p99, "{:.2f}"), MISSING]]
    for name, rate in zip(("gRPC on loopback", "shared memory or NIXL"), rates, strict=True):
        ms = None if rate is None or bytes_per_token is None else budget.context * bytes_per_token / rate / 1e6
        rows.append(
            [f"bytes of {budget.context} tokens, {name}", _number(ms, "{:.2f}"), MISSING, _number(rate, "{:.2f}")]
        )
    return markdown(["", "ms, median", "ms, p99", "GB/s"], rows)


def starts(results: Results) -> str:
    """Return how long each server takes to be ready."""
    rows = [
        [TITLES[engine], _cell(results, Key(engine, START, "seconds"), "{:.1f}")]
        for engine in (BATON, BATON_SPLIT, VLLM)
    ]
    return markdown(["engine", "seconds from start to ready"], rows)


def reasons(results: Results, budget: Budget) -> Iterator[str]:
    """Yield a line for each engine and workload without a figure."""
    workloads = [prefill_name(length) for length in (budget.context, budget.long_prompt)]
    workloads += [decode_name(batch) for batch in budget.batches]
    for engine in CLOSED:
        for workload in workloads:
            if results.median(Key(engine, workload)).value is None:
                why = results.why_not(Key(engine, workload))
                if why != "not measured":
                    yield f"- {TITLES[engine]}, {workload}: {why}"


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; columns of numbers are aligned to the right."""
    numeric = [bool(rows) and all(_is_number(row[at]) for row in rows) for at in range(len(columns))]
    rule = "|".join(" ---: " if right else " --- " for right in numeric)
    return "\n".join((_line(columns), f"|{rule}|", *map(_line, rows)))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _is_number(cell: str) -> bool:
    return cell == MISSING or cell[:1].isdigit()


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else form.format(value)


def _cell(results: Results, key: Key, form: str) -> str:
    return _number(results.median(key).value, form)

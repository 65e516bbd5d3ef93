"""The goals of Baton's CPU path, each a figure of one run, and whether it was met. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.peers.budget import Budget
from benchmarks.peers.figures import highest_rate, most_good
from benchmarks.peers.names import (
    BATON,
    BATON_SPLIT,
    CONTINUOUS,
    GENERATE,
    HAND_OVER,
    KV_WASTE,
    LLAMA,
    LLAMA_1T,
    START,
    TITLES,
    VLLM,
    chats_name,
    decode_name,
    prefill_name,
    steady_name,
)
from benchmarks.peers.results import Found, Key, Results

LIBRARIES_AND_SERVERS = (VLLM, LLAMA, GENERATE, CONTINUOUS)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table of goals."""

    work: str
    goal: str
    figure: str
    met: bool | None
    """None: there is no figure to tell it by."""


def verdicts(results: Results, budget: Budget) -> list[Verdict]:
    """Return all goals with their figures."""
    return [
        *_decode(results, budget),
        *_prefill(results, budget),
        *_goodput(results, budget),
        _stall(results),
        *_hand_over(results),
        _at_most("KV waste, chats", results.median(Key(BATON_SPLIT, KV_WASTE, "share")), 0.04, "4 %", "{:.1%}"),
        _at_most("start to ready, warm", results.median(Key(BATON_SPLIT, START, "seconds")), 15.0, "15 s", "{:.1f} s"),
    ]


def _decode(results: Results, budget: Budget) -> Iterator[Verdict]:
    for ours, theirs in ((BATON_SPLIT, LLAMA_1T), (BATON, LLAMA)):
        yield _faster(results, decode_name(1), ours, theirs, 1.1)
    for batch, factor in ((8, 1.5), (32, 1.3)):
        if batch in budget.batches:
            yield _faster(results, decode_name(batch), BATON, VLLM, factor)
            yield _faster(results, decode_name(batch), BATON, GENERATE, 5.0)


def _prefill(results: Results, budget: Budget) -> Iterator[Verdict]:
    for length in (budget.context, budget.long_prompt):
        workload = prefill_name(length)
        best = results.best([Key(engine, workload) for engine in LIBRARIES_AND_SERVERS])
        yield _faster(results, workload, BATON, best.engine if best is not None else VLLM, 1.2)


def _faster(results: Results, workload: str, ours: str, theirs: str, factor: float) -> Verdict:
    found = results.ratio(Key(ours, workload), Key(theirs, workload))
    work = f"{workload}, tokens/s: {TITLES[ours]} / {TITLES[theirs]}"
    return _at_least(work, found, factor, f"{factor:g} x", "{:.2f} x")


def _goodput(results: Results, budget: Budget) -> Iterator[Verdict]:
    """Two readings: the most good requests a second, and the highest rate of which 90 % are good."""
    ours, theirs = (shares(results, engine, budget, injected=True) for engine in (BATON_SPLIT, VLLM))
    work = "goodput of chats beside long prompts: Baton 1P+1D / vLLM, "
    for name, measure in (("most good requests/s", most_good), ("highest rate with 90 % good", highest_rate)):
        if not ours or not theirs:
            rate = Key(VLLM if ours else BATON_SPLIT, chats_name(budget.rates[0], True))
            yield Verdict(work + name, "≥ 2 x", results.why_not(rate), None)
            continue
        over, under = measure(ours), measure(theirs)
        ratio = f"{over / under:.2f} x" if under else "no ratio, vLLM has none" if over else "neither has any"
        met = over >= 2 * under and over > 0
        yield Verdict(work + name, "≥ 2 x", f"{over:.2f}/s against {under:.2f}/s: {ratio}", met)


def shares(results: Results, engine: str, budget: Budget, injected: bool) -> Mapping[float, float]:
    """Return the share of good requests by rate, as far as it was measured."""
    found = {rate: results.median(Key(engine, chats_name(rate, injected), "good_share")) for rate in budget.rates}
    return {rate: one.value for rate, one in found.items() if one.value is not None}


def _stall(results: Results) -> Verdict:
    """How much long prompts stretch the gaps of chats that go on, and what they do to vLLM's."""
    ratios = [
        results.ratio(Key(engine, steady_name(True), "itl_p99_ms"), Key(engine, steady_name(False), "itl_p99_ms"))
        for engine in (BATON_SPLIT, VLLM)
    ]
    found, theirs = ratios
    beside = f" (vLLM: {theirs.value:.1f} x)" if theirs.value is not None else ""
    verdict = _at_most("ITL p99 of 4 chats, with long prompts / without", found, 1.3, "1.3 x", "{:.2f} x")
    return Verdict(verdict.work, verdict.goal, verdict.figure + beside, verdict.met)


def _hand_over(results: Results) -> Iterator[Verdict]:
    median, p99, grpc, shared = (
        results.median(Key(HAND_OVER, HAND_OVER, name))
        for name in ("empty_p50_ms", "empty_p99_ms", "grpc_gb_per_s", "shared_gb_per_s")
    )
    yield _at_most("hand-over without bytes, median", median, 5.0, "5 ms", "{:.2f} ms")
    rate = results.median(Key(BATON_SPLIT, decode_name(1)))
    step_ms = 1e3 / rate.value if rate.value else None
    if step_ms is None:
        yield Verdict("hand-over without bytes, p99", "≤ 1 decode step", rate.why, None)
    else:
        yield _at_most("hand-over without bytes, p99", p99, step_ms, f"1 decode step ({step_ms:.1f} ms)", "{:.2f} ms")
    yield _at_least("bytes over gRPC on loopback", grpc, 0.8, "0.8 GB/s", "{:.2f} GB/s")
    yield _at_least("bytes over NIXL or shared memory", shared, 3.0, "3 GB/s", "{:.2f} GB/s")


def _at_least(work: str, found: Found, limit: float, goal: str, form: str) -> Verdict:
    if found.value is None:
        return Verdict(work, f"≥ {goal}", found.why, None)
    return Verdict(work, f"≥ {goal}", form.format(found.value), found.value >= limit)


def _at_most(work: str, found: Found, limit: float, goal: str, form: str) -> Verdict:
    if found.value is None:
        return Verdict(work, f"≤ {goal}", found.why, None)
    return Verdict(work, f"≤ {goal}", form.format(found.value), found.value <= limit)

"""Measures a running cluster through its own HTTP API and returns the numbers that a simulation runs on.

Cold prompts of several lengths give the time to a first token, remote where the gateway decides so and local for short
ones; streams side by side give the time between tokens by how many there are and how long their contexts are. The
numbers are fitted by least squares, none below zero. The cluster should have nothing else to do meanwhile.
"""

import asyncio
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx2
import msgspec
import numpy as np

from common.errors import Unavailable
from compose.console import note
from compose.readiness import error_message
from compose.status import fetch_cluster
from compose.tune.profile import CostProfile

PROMPTS = (128, 256, 512, 1024, 1536)
LOCAL_PROMPTS = (16, 32, 48)
BATCHES = (1, 2, 4, 8)
CONTEXTS = (32, 640)
REPEATS = 3
PROBE_TOKENS = 24
FIRST_ID, LAST_ID = 10, 250
"""Token ids that every vocabulary has."""


@dataclass(slots=True)
class Probe:
    """One measured stream; times in seconds from the request."""

    prompt_tokens: int
    is_remote: bool
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Probes:
    """All that was measured."""

    alone: Sequence[Probe]
    batches: Sequence[Sequence[Probe]]


async def calibrate(url: str, api_key: str = "") -> CostProfile:
    """Return the profile of the cluster behind ``url``; raises Unavailable when it does not answer well enough."""
    cluster = await fetch_cluster(url, api_key)
    headers = {"Authorization": f"Bearer {api_key.split()[0]}"} if api_key.strip() else {}
    async with httpx2.AsyncClient(base_url=url, headers=headers, trust_env=False, timeout=300.0) as client:
        try:
            await _stream(client, 256)  # kernels are compiled, rates measured
            probes = await _measure(client, min(worker.max_model_len for worker in cluster.workers))
        except httpx2.HTTPError as error:
            raise Unavailable(f"{url} stopped answering while it was measured ({type(error).__name__})") from error
    blocks = min(worker.blocks.total for worker in cluster.workers)
    return fit(probes, kv_blocks=blocks)


async def _measure(client: httpx2.AsyncClient, limit: int) -> Probes:
    alone: list[Probe] = []
    for length in (*LOCAL_PROMPTS, *PROMPTS):
        if length + PROBE_TOKENS < limit:
            note(f"measuring prompts of {length} tokens")
            alone += [await _stream(client, length, max_tokens=4) for _ in range(REPEATS)]
    batches: list[Sequence[Probe]] = []
    for context, size in itertools.product(CONTEXTS, BATCHES):
        if context + PROBE_TOKENS < limit:
            note(f"measuring {size} answers behind {context} tokens")
            batches.append(await asyncio.gather(*(_stream(client, context) for _ in range(size))))
    return Probes(alone, batches)


async def _stream(client: httpx2.AsyncClient, length: int, max_tokens: int = PROBE_TOKENS) -> Probe:
    body = {
        "prompt": random.choices(range(FIRST_ID, LAST_ID), k=length),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    clock = asyncio.get_running_loop().time
    began = clock()
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            raise Unavailable(f"a probe was refused: {error_message(answer)}")
        probe = Probe(length, answer.headers.get("x-baton-route", "").startswith("remote"))
        async for line in answer.aiter_lines():
            probe.times += [clock() - began] * num_tokens(line)
    return probe


def num_tokens(line: str) -> int:
    """Return how many tokens a line of a stream brings, which was asked for with ``return_token_ids``."""
    if not line.startswith("data: {"):
        return 0
    event = msgspec.json.decode(line.removeprefix("data: "), type=_Event)
    return sum(len(choice.token_ids or ()) for choice in event.choices)


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


def fit(probes: Probes, *, kv_blocks: int) -> CostProfile:
    """Return the profile that explains ``probes`` best; raises Unavailable when there are too few."""
    remote = [probe for probe in probes.alone if probe.is_remote]
    local = [probe for probe in probes.alone if not probe.is_remote]
    reading = remote if len({probe.prompt_tokens for probe in remote}) >= 3 else [*remote, *local]
    if len({probe.prompt_tokens for probe in reading}) < 3 or not probes.batches:
        raise Unavailable("too few prompts could be measured; is --max-model-len very small?")
    overhead_s, token_s, attention_s = _fit_reading(reading)
    base_s, sequence_s, context_s = _fit_writing(probes.batches)
    local_s = statistics.median([_first(probe) - probe.prompt_tokens * token_s for probe in local] or [overhead_s])
    one_token_s = base_s + sequence_s
    waits = [(probe.prompt_tokens, _second(probe) - one_token_s) for probe in remote if len(probe.times) > 1]
    transfer_base_s, transfer_token_s = _line(waits) if waits else (0.0, 0.0)
    prefill_base_s = min(overhead_s, local_s, base_s) / 2  # a step's own share of what does not depend on the prompt
    return CostProfile(
        prefill_base_s=prefill_base_s,
        prompt_token_s=token_s,
        prompt_attention_s=attention_s,
        decode_base_s=base_s,
        sequence_s=sequence_s,
        context_token_s=context_s,
        local_overhead_s=max(0.0, local_s - prefill_base_s),
        remote_overhead_s=max(0.0, overhead_s - prefill_base_s),
        transfer_base_s=transfer_base_s,
        transfer_token_s=transfer_token_s,
        kv_blocks=kv_blocks,
    )


def _fit_reading(probes: Sequence[Probe]) -> tuple[float, ...]:
    """Return overhead, seconds a token, and seconds a token and token of context, of times to a first token."""
    lengths = _medians([(probe.prompt_tokens, _first(probe)) for probe in probes])
    rows = [[1.0, length, length * length / 2] for length in lengths]
    return _least_squares(rows, list(lengths.values()))


def _fit_writing(batches: Sequence[Sequence[Probe]]) -> tuple[float, ...]:
    """Return seconds a step, a sequence and a token of context, of the times between tokens."""
    rows, seconds = [], []
    for probes in batches:
        if any(len(probe.times) < 3 for probe in probes):
            raise Unavailable("an answer of the measurement was cut short")
        begin, end = max(probe.times[1] for probe in probes), min(probe.times[-1] for probe in probes)
        together = [_gaps(probe, begin, end) for probe in probes]
        gaps = [gap for found in together for gap in found]
        if gaps:
            context = sum(probe.prompt_tokens + PROBE_TOKENS / 2 for probe in probes)
            rows.append([1.0, float(len(probes)), context])
            seconds.append(statistics.fmean(gaps))
    if len(rows) < 3:
        raise Unavailable("the answers ran too little side by side to be measured")
    return _least_squares(rows, seconds)


def _gaps(probe: Probe, begin: float, end: float) -> list[float]:
    return [after - before for before, after in itertools.pairwise(probe.times) if begin <= before and after <= end]


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, ...]:
    medians = _medians(points)
    return _least_squares([[1.0, float(length)] for length in medians], list(medians.values()))


def _medians(points: Sequence[tuple[int, float]]) -> dict[int, float]:
    lengths = sorted({length for length, _ in points})
    return {one: statistics.median(value for length, value in points if length == one) for one in lengths}


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Return the coefficients, none negative, that come closest to ``values`` by share rather than by size.

    There are at most three, so every subset of them that may be above zero is tried.
    """
    matrix, goal = np.array(rows), np.maximum(np.array(values), 1e-9)
    matrix, goal = matrix / goal[:, None], np.ones_like(goal)
    found, least = np.zeros(matrix.shape[1]), np.inf
    for size in range(1, matrix.shape[1] + 1):
        for columns in itertools.combinations(range(matrix.shape[1]), size):
            part, *_ = np.linalg.lstsq(matrix[:, columns], goal, rcond=None)
            error = float(np.sum((matrix[:, columns] @ part - goal) ** 2))
            if (part >= 0).all() and error < least - 1e-12:
                found, least = np.zeros(matrix.shape[1]), error
                found[list(columns)] = part
    return tuple(float(value) for value in found)


def _first(probe: Probe) -> float:
    return probe.times[0]


def _second(probe: Probe) -> float:
    return probe.times[1] - probe.times[0]

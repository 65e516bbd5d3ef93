"""From probes of a cluster to the numbers of its profile, by least squares. Pure."""

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.errors import Unavailable
from compose.tune.probe import PROBE_TOKENS, Probe, Probes
from compose.tune.profile import CostProfile

NOISE = 0.05
"""A slow-down below this share is none."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """Seconds to a first token: what does not depend on the prompt, a token, and a token and token of context."""

    overhead_s: float
    token_s: float
    attention_s: float

    def tokens_s(self, length: int) -> float:
        """Return what a prompt's tokens take."""
        return length * (self.token_s + self.attention_s * length / 2)


@dataclass(frozen=True, slots=True)
class _Writing:
    """Seconds of a step, a sequence in it, and a token of context."""

    base_s: float
    sequence_s: float
    context_s: float

    def step_s(self, num_sequences: int, context: float) -> float:
        """Return what a step of so many sequences takes that have ``context`` tokens together."""
        return self.base_s + self.sequence_s * num_sequences + self.context_s * context


def fit(probes: Probes, *, kv_blocks: int) -> CostProfile:
    """Return the profile that explains ``probes`` best; raises Unavailable when there are too few."""
    remote = [probe for probe in probes.alone if probe.is_remote]
    local = [probe for probe in probes.alone if not probe.is_remote]
    reading = _fit_reading(remote if len({probe.prompt_tokens for probe in remote}) >= 3 else [*remote, *local])
    writing = _fit_writing(probes.batches)
    base_s = _prefill_base_s(probes.queued, reading, writing)
    local_s = statistics.median(
        [one.ttft_s - reading.tokens_s(one.prompt_tokens) for one in local] or [reading.overhead_s]
    )
    waits = [(one.prompt_tokens, one.times[1] - one.times[0] - writing.step_s(1, one.prompt_tokens)) for one in remote]
    transfer_base_s, transfer_token_s = _line(waits) if waits else (0.0, 0.0)
    return CostProfile(
        prefill_base_s=base_s,
        prompt_token_s=reading.token_s,
        prompt_attention_s=reading.attention_s,
        decode_base_s=writing.base_s,
        sequence_s=writing.sequence_s,
        context_token_s=writing.context_s,
        local_overhead_s=max(0.0, local_s - base_s),
        remote_overhead_s=max(0.0, reading.overhead_s - base_s),
        transfer_base_s=transfer_base_s,
        transfer_token_s=transfer_token_s,
        decode_contention=_beyond_noise(_slowed_writing(probes, writing)),
        prefill_contention=_beyond_noise(_slowed_reading(probes)),
        kv_blocks=kv_blocks,
    )


# ---- a worker alone ----


def _fit_reading(probes: Sequence[Probe]) -> _Reading:
    if len({probe.prompt_tokens for probe in probes}) < 3:
        raise Unavailable("too few prompts could be measured; is --max-model-len very small?")
    lengths = _medians([(probe.prompt_tokens, probe.ttft_s) for probe in probes])
    rows = [[1.0, length, length * length / 2] for length in lengths]
    return _Reading(*_least_squares(rows, list(lengths.values())))


def _prefill_base_s(queued: Sequence[Sequence[Probe]], reading: _Reading, writing: _Writing) -> float:
    """Return what a step of a prefill worker takes beside its tokens.

    Of prompts that are sent at once, each waits for the steps of those before it and for nothing else, so their first
    tokens are a step apart. Where none were queued: what a decode step takes.
    """
    steps = []
    for probes in queued:
        for worker in {probe.prefill for probe in probes if probe.is_remote}:
            times = sorted(probe.began + probe.ttft_s for probe in probes if probe.prefill == worker)
            steps += [after - before for before, after in itertools.pairwise(times)]
    if not steps:
        return min(reading.overhead_s, writing.base_s)
    base_s = statistics.median(steps) - reading.tokens_s(queued[0][0].prompt_tokens)
    return min(reading.overhead_s, max(0.0, base_s))


def _fit_writing(batches: Sequence[Sequence[Probe]]) -> _Writing:
    """Explain the times between tokens by how many sequences each decode worker had, and their contexts."""
    rows, seconds = [], []
    for probes in batches:
        if any(len(probe.times) < 3 for probe in probes):
            raise Unavailable("an answer of the measurement was cut short")
        for worker in {probe.decode for probe in probes}:
            beside = [probe for probe in probes if probe.decode == worker]
            begin = max(probe.began + probe.times[1] for probe in beside)
            end = min(probe.began + probe.times[-1] for probe in beside)
            gaps = [gap for probe in beside for gap in probe.gaps(begin, end)]
            if gaps:
                context = sum(probe.prompt_tokens + PROBE_TOKENS / 2 for probe in beside)
                rows.append([1.0, float(len(beside)), context])
                seconds.append(statistics.fmean(gaps))
    if len(rows) < 3:
        raise Unavailable("the answers ran too little side by side to be measured")
    return _Writing(*_least_squares(rows, seconds))


# ---- workers that slow each other down ----


def _slowed_writing(probes: Probes, writing: _Writing) -> float:
    """Return by how much longer, as a share, steps of decode workers took while a prefill worker read."""
    reading = [probe for probe in probes.reading if probe.is_remote]
    if not reading:
        return 0.0
    begin, end = reading[0].began, reading[-1].began + reading[-1].ttft_s
    beside = Counter(probe.decode for probe in probes.writing)
    shares = []
    for probe in probes.writing:
        gaps = probe.gaps(begin, end)
        num, context = beside[probe.decode], probe.prompt_tokens + len(probe.times) / 2
        if gaps:
            shares.append(statistics.fmean(gaps) / writing.step_s(num, num * context))
    return statistics.fmean(shares) - 1 if shares else 0.0


def _slowed_reading(probes: Probes) -> float:
    """Return by how much longer, as a share, prompts took to read while answers were written."""
    alone = _medians([(one.prompt_tokens, one.ttft_s) for one in probes.alone if one.is_remote])
    last = min((one.began + one.times[-1] for one in probes.writing), default=0.0)
    beside = [one for one in probes.reading if one.is_remote and one.began + one.ttft_s <= last]
    shares = [one.ttft_s / alone[one.prompt_tokens] for one in beside if one.prompt_tokens in alone]
    return statistics.median(shares) - 1 if shares else 0.0


def _beyond_noise(share: float) -> float:
    return share if share > NOISE else 0.0


# ---- arithmetic ----


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

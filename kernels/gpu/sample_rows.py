"""Penalties, and drawing one token a row: temperature, top-k, top-p, min-p, a race; all in float64.

Nothing is sorted. What top-k or top-p keeps is all weights from some least one on, and that one is found by bisection:
a pass over the row sums the weights (or counts the tokens) above a guess, until only one token lies between enough and
too little. What is kept races as :mod:`common.model.race` says. Grid ``[rows]``, one program a row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
_PENALTY_BLOCK = 256

NUMBERS = 4
"""float64 parameters of a row: temperature (0: greedy), top_k (0: off), top_p (1: off) and min_p."""


@triton.jit
def _least_kept(weights, vocab, goal, least, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Return a number that the largest weights of sum (or number) ``goal`` reach and, but for ties, no other does."""
    low = least
    high = tl.full((), 2.0, tl.float64)
    low_count = vocab
    high_count = vocab * 0
    steps = vocab * 0
    while (low_count - high_count > 1) & (steps < 64):
        middle = tl.sqrt(low) * tl.sqrt(high)
        count = vocab * 0
        mass = tl.full((), 0.0, tl.float64)
        for start in range(0, vocab, BLOCK):
            index = start + tl.arange(0, BLOCK)
            weight = tl.load(weights + index, mask=index < vocab, other=0.0)
            above = weight >= middle
            count += tl.sum(above.to(tl.int32), 0)
            mass += tl.sum(tl.where(above, weight, 0.0), 0)
        if BY_COUNT:
            enough = count >= goal
        else:
            enough = mass >= goal
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, middle)
        high_count = tl.where(enough, high_count, count)
        steps += 1
    return low


@triton.jit
def _kept_mass(weights, vocab, least, BLOCK: tl.constexpr):
    mass = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + index, mask=index < vocab, other=0.0)
        mass += tl.sum(tl.where(weight >= least, weight, 0.0), 0)
    return mass


@triton.jit
def _arrival_times(key, index):
    """Return an exponentially distributed number for each token of ``index``: splitmix64 at its place."""
    word = key + (index.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    word = word ^ (word >> 31)
    return -tl.log(((word >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16)  # / 2**52


@triton.jit
def _sample_rows_kernel(
    tokens,  # [R] int64; -1 where a row is not finite
    weights,  # [R, vocab] float64, written here
    scores,  # [R, vocab] float32 or float64
    numbers,  # [R, 4] float64
    keys,  # [R] int64, the bits of each row's noise key
    vocab,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weights += row * vocab
    scores += row * vocab
    temperature = tl.load(numbers + row * 4)
    top_k = tl.load(numbers + row * 4 + 1)
    top_p = tl.load(numbers + row * 4 + 2)
    min_p = tl.load(numbers + row * 4 + 3)
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    is_greedy = temperature == 0

    best = tl.full((), float("-inf"), tl.float64)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        score = tl.load(scores + index, mask=index < vocab, other=float("-inf")).to(tl.float64)
        best = tl.maximum(best, tl.max(score, 0))

    is_finite = tl.abs(best) < float("inf")
    base = tl.where(is_finite, best, 0.0)
    total = tl.full((), 0.0, tl.float64)
    divisor = tl.where(is_greedy, 1.0, temperature)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        score = tl.load(scores + index, mask=index < vocab, other=float("-inf")).to(tl.float64)
        weight = tl.exp(tl.where(is_finite, score - base, 0.0) / divisor)
        weight = tl.where(is_greedy, tl.where(score < best, 0.0, 1.0), weight)
        tl.store(weights + index, weight, mask=index < vocab)
        total += tl.sum(tl.where(index < vocab, weight, 0.0), 0)
    tl.debug_barrier()  # other threads of the program read what this one has written

    least = tl.exp(tl.full((), -690.0, tl.float64))  # what is below weighs nothing
    if top_k > 0:
        least = _least_kept(weights, vocab, top_k, least, True, BLOCK)
    if top_p < 1:
        goal = top_p * _kept_mass(weights, vocab, least, BLOCK)
        least = _least_kept(weights, vocab, goal, least, False, BLOCK)
    least = tl.maximum(least, tl.where(is_greedy, 0.0, min_p))

    token = vocab * 0
    soonest = tl.full((), 0.0, tl.float64)
    for start in range(0, vocab, BLOCK):
        index = start + tl.arange(0, BLOCK)
        weight = tl.load(weights + index, mask=index < vocab, other=0.0)
        rate = tl.where(weight >= least, weight, 0.0)
        rate = tl.where(is_greedy, rate, rate / _arrival_times(key, index))
        here = tl.max(rate, 0)
        first = tl.min(tl.where(rate == here, index, vocab), 0)
        token = tl.where(here > soonest, first, token)
        soonest = tl.maximum(soonest, here)
    token = tl.where(total == total, token, -1)
    tl.store(tokens + row, tl.where(is_finite, token, -1).to(tl.int64))


@triton.jit(do_not_specialize=["width"])  # it grows with the output
def _penalise_rows_kernel(
    scores,  # [R, vocab] float64
    ids,  # [R, width] int64, each at most once in a row; -1: none
    counts,  # [R, width] float64
    penalties,  # [R, 3] float64: repetition, presence, frequency
    vocab,
    width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row * width + index, mask=index < width, other=-1)
    given = token >= 0
    count = tl.load(counts + row * width + index, mask=given, other=0.0)
    repetition = tl.load(penalties + row * 3)
    presence = tl.load(penalties + row * 3 + 1)
    frequency = tl.load(penalties + row * 3 + 2)
    score = tl.load(scores + row * vocab + token, mask=given, other=0.0)
    score = tl.where(score > 0, score / repetition, score * repetition)
    score -= frequency * count + tl.where(count > 0, presence, 0.0)
    tl.store(scores + row * vocab + token, score, mask=given)


@dataclass(frozen=True, slots=True, eq=False)
class Penalties:
    """What the tokens before do to some rows."""

    ids: Tensor
    """``[R, width]`` int64: tokens of each sequence, each once; -1 past their end."""
    counts: Tensor
    """``[R, width]`` float64: how often each is in the output."""
    factors: Tensor
    """``[R, 3]`` float64: repetition, presence and frequency penalty."""


def penalise_rows(scores: Tensor, penalties: Penalties) -> None:
    """Change ``scores [R, vocab]`` float64, contiguous, in place."""
    num_rows, width = penalties.ids.shape
    _penalise_rows_kernel[(num_rows, triton.cdiv(width, _PENALTY_BLOCK))](
        scores, penalties.ids, penalties.counts, penalties.factors, scores.shape[1], width, BLOCK=_PENALTY_BLOCK
    )


def sample_rows(scores: Tensor, numbers: Tensor, keys: Tensor) -> Tensor:
    """Return ``[R]`` int64 tokens for ``scores [R, vocab]`` float32 or float64, contiguous; -1 for a row of NaN or inf.

    ``numbers [R, NUMBERS]`` float64; ``keys [R]`` int64, the bits of the rows' noise keys.
    """
    num_rows, vocab = scores.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=scores.device)
    weights = torch.empty(num_rows, vocab, dtype=torch.float64, device=scores.device)
    _sample_rows_kernel[(num_rows,)](
        tokens, weights, scores, numbers, keys, vocab, BLOCK=min(_BLOCK, triton.next_power_of_2(vocab)), num_warps=8
    )
    return tokens

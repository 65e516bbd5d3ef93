"""Sampling one row with Python numbers, written from the docstrings alone: the oracle of the sampler."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.sampling import SamplingParams, noise_key


@dataclass(frozen=True, slots=True)
class PlainCase:
    """One row's parameters and the tokens before it."""

    params: SamplingParams
    sample_index: int
    prompt: Sequence[int]
    output: Sequence[int]


def edited(logits: Sequence[float], case: PlainCase) -> list[float]:
    """Return the logits after bias, penalties and forbidden tokens."""
    params, scores = case.params, list(logits)
    if params.allowed_token_ids:
        scores = [x if token in params.allowed_token_ids else -math.inf for token, x in enumerate(scores)]
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in {*case.prompt, *case.output}:
        x = scores[token]
        scores[token] = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
    for token in set(case.output):
        scores[token] -= params.presence_penalty + params.frequency_penalty * list(case.output).count(token)
    forbidden = set()
    if len(case.output) < params.min_tokens:
        forbidden |= {*params.eos_token_ids, *params.stop_token_ids}
    for word in params.bad_words:
        if tuple(case.output[len(case.output) - len(word) + 1 :])[: len(word) - 1] == word[:-1] or len(word) == 1:
            forbidden.add(word[-1])
    without = [-math.inf if token in forbidden else x for token, x in enumerate(scores)]
    return scores if max(without) == -math.inf else without


def plain_sample(logits: Sequence[float], case: PlainCase) -> int:
    """Return the token that the definition gives."""
    params, scores = case.params, edited(logits, case)
    best = max(scores)
    if params.temperature == 0:
        return scores.index(best)
    weights = kept_weights([(x - best) / params.temperature for x in scores], params)
    position = len(case.prompt) + len(case.output)
    key = noise_key(params.seed, case.sample_index, position)
    arrived = [math.inf if weight == 0 else arrival_time(key, token) / weight for token, weight in enumerate(weights)]
    return arrived.index(min(arrived))


def arrival_time(key: int, token: int) -> float:
    """Return the exponentially distributed number of a token: splitmix64 at the token's place, 52 bits of it."""
    word = (key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    return -math.log(((word >> 12) + 0.5) / 2**52)


def kept_weights(scaled: Sequence[float], params: SamplingParams) -> list[float]:
    """Return each token's weight, 0 where it is not kept. ``scaled`` has 0 as its largest."""
    weights = [math.exp(x) for x in scaled]
    if 0 < params.top_k < len(weights):
        least = sorted(scaled)[-params.top_k]
        weights = [w if x >= least else 0.0 for w, x in zip(weights, scaled, strict=True)]
    if params.top_p < 1:
        least = _reached(sorted(weights, reverse=True), params.top_p * math.fsum(weights))
        weights = [w if w >= least else 0.0 for w in weights]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    if params.typical_p < 1:
        weights = _typical(weights, params.typical_p)
    return weights


def _reached(ordered: Sequence[float], goal: float) -> float:
    running = 0.0
    for weight in ordered:
        running += weight
        if running >= goal:
            return weight
    return ordered[-1]


def _typical(weights: Sequence[float], typical_p: float) -> list[float]:
    total = math.fsum(weights)
    shares = [w / total for w in weights]
    entropy = -math.fsum(p * math.log(p) for p in shares if p > 0)
    distances = [abs(-math.log(p) - entropy) if p > 0 else math.inf for p in shares]
    running, farthest = 0.0, 0.0
    for distance, share in sorted(zip(distances, shares, strict=True)):
        running, farthest = running + share, distance
        if running >= typical_p:
            break
    return [w if distance <= farthest else 0.0 for w, distance in zip(weights, distances, strict=True)]

"""What is sent, and when: made from a seed, so that it can be sent again. Pure but for reading a trace."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from compose.bench.config import BenchServeConfig
from compose.tune.trace import Arrival, read_trace, scaled

LOWEST_ID = 64
"""Lower token ids are special in many vocabularies."""

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()
"""A token each in most vocabularies."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send."""

    at_s: float
    """Seconds from the start."""
    prompt: tuple[int, ...]
    """Token ids; a chat writes a word for each."""
    output_len: int

    def text(self) -> str:
        """Return words instead of token ids; equal ids are equal words."""
        return " ".join(_WORDS[token_id % len(_WORDS)] for token_id in self.prompt)


def make_jobs(config: BenchServeConfig) -> list[Job]:
    """Return all requests in order of time; raises ConfigError when the trace cannot be read."""
    if config.trace is not None:
        return list(_from_trace(config, read_trace(config.trace, config.num_prompts)))
    draw = random.Random(config.seed)
    prompts = [_prompt(config, draw) for _ in range(config.num_prompts)]
    lengths = [_around(config.output_len, config.range_ratio, draw) for _ in prompts]
    if config.dataset == "prefix":
        shared = [_ids(config, draw, config.prefix_len) for _ in range(config.num_prefixes)]
        prompts = [(*draw.choice(shared), *prompt) for prompt in prompts]
    times = send_times(config.num_prompts, config.request_rate, config.burstiness, draw)
    return [Job(*one) for one in zip(times, prompts, lengths, strict=True)]


def make_warmups(config: BenchServeConfig) -> list[Job]:
    """Return the requests that come first; they share nothing with the others."""
    draw = random.Random(f"warm-up {config.seed}")
    return [Job(0.0, _prompt(config, draw), config.output_len) for _ in range(config.num_warmups)]


def send_times(count: int, rate: float, burstiness: float, draw: random.Random) -> list[float]:
    """Return when to send, in seconds: gaps of a gamma distribution, together as long as ``count`` at ``rate`` takes.

    The sum is set right so that runs with few requests have the rate that was asked for, as other tools do.
    """
    if rate == inf:
        return [0.0] * count
    gaps = [draw.gammavariate(burstiness, 1 / (rate * burstiness)) for _ in range(count)]
    factor = count / rate / sum(gaps)
    return [0.0, *accumulate(gap * factor for gap in gaps[1:])]


def _from_trace(config: BenchServeConfig, arrivals: Sequence[Arrival]) -> Iterator[Job]:
    if config.request_rate != inf:
        arrivals = scaled(arrivals, config.request_rate)
    for number, arrival in enumerate(arrivals):
        span = config.vocab_size - LOWEST_ID
        prompt = tuple(LOWEST_ID + _mixed(token_id) % span for token_id in arrival.token_ids(number))
        yield Job(arrival.at_s, prompt, arrival.answer_tokens)


def _mixed(number: int) -> int:
    """Return another number for each number, so that those that are equal modulo the vocabulary lie far apart."""
    return (number * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF) >> 20


def _prompt(config: BenchServeConfig, draw: random.Random) -> tuple[int, ...]:
    return _ids(config, draw, _around(config.input_len, config.range_ratio, draw))


def _ids(config: BenchServeConfig, draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(LOWEST_ID, config.vocab_size), k=count))


def _around(length: int, range_ratio: float, draw: random.Random) -> int:
    return max(1, draw.randint(int(length * (1 - range_ratio)), int(length * (1 + range_ratio))))

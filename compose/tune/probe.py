"""Streams that measure a running cluster: what is asked, and what a client sees of it.

Prompts are random, so nothing of them is cached unless they are sent twice.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import httpx2
import msgspec

from common.errors import Unavailable
from compose.console import note
from compose.readiness import error_message

PROMPTS = (128, 256, 512, 1024, 1536)
LOCAL_PROMPTS = (16, 32, 48)
BATCHES = (1, 2, 4, 8)
CONTEXTS = (32, 640)
REPEATS = 3
PROBE_TOKENS = 24
QUEUED, QUEUED_TOKENS = 4, 512
"""Prompts that are sent at once; each fills a step of the default budget."""
BESIDE, BESIDE_TOKENS = 4, 160
"""Answers that are written while prompts are read, and their length."""
FIRST_ID, LAST_ID = 10, 250
"""Token ids that every vocabulary has."""


@dataclass(slots=True)
class Probe:
    """One measured stream; times in seconds from the request."""

    prompt_tokens: int
    is_remote: bool
    times: list[float] = field(default_factory=list)
    prefill: str = ""
    """Who read the prompt, if it was remote."""
    decode: str = ""
    """Who wrote the answer."""
    began: float = 0.0
    """When it was asked for, by one clock for all."""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the seconds between its tokens that came from ``begin`` to ``end``, of the clock of ``began``."""
        times = [self.began + time for time in self.times]
        return [after - before for before, after in itertools.pairwise(times) if begin <= before and after <= end]


@dataclass(frozen=True, slots=True)
class Probes:
    """All that was measured."""

    alone: Sequence[Probe]
    """One at a time."""
    batches: Sequence[Sequence[Probe]]
    """Answers side by side."""
    queued: Sequence[Sequence[Probe]] = ()
    """Prompts of QUEUED_TOKENS that were sent at once."""
    writing: Sequence[Probe] = ()
    """Answers that were written while ``reading`` was read."""
    reading: Sequence[Probe] = ()
    """Prompts that were read one after the other meanwhile."""


async def measure(client: httpx2.AsyncClient, limit: int) -> Probes:
    """Send all probes that fit ``limit`` tokens; raises Unavailable when one is refused, or what httpx2 raises."""
    alone: list[Probe] = []
    for length in (*LOCAL_PROMPTS, *PROMPTS):
        if length + PROBE_TOKENS < limit:
            note(f"measuring prompts of {length} tokens")
            alone += [await stream(client, prompt(length), 4) for _ in range(REPEATS)]
    queued: list[Sequence[Probe]] = []
    if QUEUED_TOKENS < limit:
        note(f"measuring {QUEUED} prompts of {QUEUED_TOKENS} tokens at once")
        queued = [await _together(client, [prompt(QUEUED_TOKENS) for _ in range(QUEUED)], 1) for _ in range(REPEATS)]
    batches: list[Sequence[Probe]] = []
    for context, size in itertools.product(CONTEXTS, BATCHES):
        if context + PROBE_TOKENS < limit:
            note(f"measuring {size} answers behind {context} tokens")
            prompts = [prompt(context) for _ in range(size)]
            await _together(client, prompts, 1)  # read now, so that the answers begin together
            batches.append(await _together(client, prompts, PROBE_TOKENS))
    length = max((one for one in PROMPTS if one < min(limit, 1200)), default=0)
    note(f"measuring {BESIDE} answers beside prompts of {length} tokens")
    writing, reading = await _beside(client, length) if length and BESIDE_TOKENS + 32 < limit else ([], [])
    return Probes(alone, batches, queued, writing, reading)


async def _together(client: httpx2.AsyncClient, prompts: Sequence[list[int]], max_tokens: int) -> list[Probe]:
    return await asyncio.gather(*(stream(client, one, max_tokens) for one in prompts))


async def _beside(client: httpx2.AsyncClient, length: int) -> tuple[list[Probe], list[Probe]]:
    """Write answers, and read prompts of ``length`` one after the other until they are written."""
    reading: list[Probe] = []
    prompts = [prompt(32) for _ in range(BESIDE)]
    writing = asyncio.ensure_future(_together(client, prompts, BESIDE_TOKENS))
    try:
        while not writing.done():
            reading.append(await stream(client, prompt(length), 1))
    finally:
        if not writing.done():
            writing.cancel()
    return await writing, reading


def prompt(length: int) -> list[int]:
    """Return a prompt that nobody has seen."""
    return random.choices(range(FIRST_ID, LAST_ID), k=length)


async def stream(client: httpx2.AsyncClient, token_ids: list[int], max_tokens: int) -> Probe:
    """Ask for an answer of ``max_tokens`` and return when its tokens came; raises Unavailable when it is refused."""
    body = {
        "prompt": token_ids,
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
        kind, workers = _route(answer.headers.get("x-baton-route", ""))
        probe = Probe(
            len(token_ids), kind == "remote", [], workers.get("prefill", ""), workers.get("decode", ""), began
        )
        async for line in event_lines(answer):
            probe.times += [clock() - began] * num_tokens(line)
    return probe


def _route(header: str) -> tuple[str, dict[str, str]]:
    """Return the kind of plan, and what else the gateway says of an answer's route."""
    kind, *parts = header.split("; ")
    return kind, dict(part.split("=", 1) for part in parts if "=" in part)


async def event_lines(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """Give the lines of a stream as they come. Text may hold separators such as U+2028, which end no line here."""
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def num_tokens(line: bytes) -> int:
    """Return how many tokens a line of a stream brings, which was asked for with ``return_token_ids``."""
    if not line.startswith(b"data: {"):
        return 0
    event = msgspec.json.decode(line.removeprefix(b"data: "), type=_Event)
    return sum(len(choice.token_ids or ()) for choice in event.choices)


class _Choice(msgspec.Struct, frozen=True):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []

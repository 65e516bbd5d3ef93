"""Sends a load and keeps what each client saw."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx2

from compose.tune.probe import event_lines, num_tokens
from compose.tune.trace import Arrival
from gateway.planner.pressure import Targets

FIRST_ID, LAST_ID = 10, 250
"""Token ids that every vocabulary has."""

WARM_UP = tuple(Arrival(0.0, length, 8) for length in (300, 300, 300, 300, 30, 30, 30, 30))
"""What a fresh cluster serves first, so that every worker has measured itself."""


@dataclass(slots=True)
class Served:
    """One answer as its client saw it."""

    arrival: Arrival
    times: list[float] = field(default_factory=list)
    """Seconds from the request, one for each token."""
    error: str | None = None

    @property
    def has_failed(self) -> bool:
        """Whether it broke, or is not as long as it was asked to be."""
        return self.error is not None or len(self.times) != self.arrival.answer_tokens

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.times[0]

    @property
    def itl_s(self) -> float:
        """Mean seconds between two tokens."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    def is_good(self, targets: Targets) -> bool:
        """Whether it is complete and within both targets."""
        return not self.has_failed and self.ttft_s <= targets.ttft_s and self.itl_s <= targets.itl_s


async def serve(url: str, arrivals: Sequence[Arrival], seed: int = 0) -> list[Served]:
    """Send every request at its time, whatever became of those before, and return what came back."""
    draw = random.Random(seed)
    limits = httpx2.Limits(max_connections=1000, max_keepalive_connections=100)
    async with (
        httpx2.AsyncClient(base_url=url, timeout=600.0, trust_env=False, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        began = time.perf_counter()
        tasks = [group.create_task(_one(client, one, began, draw.getrandbits(64))) for one in arrivals]
    return [task.result() for task in tasks]


async def _one(client: httpx2.AsyncClient, arrival: Arrival, load_began: float, seed: int) -> Served:
    served = Served(arrival)
    body = {
        "prompt": random.Random(seed).choices(range(FIRST_ID, LAST_ID), k=arrival.prompt_tokens),
        "max_tokens": arrival.answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    await asyncio.sleep(max(0.0, load_began + arrival.at_s - time.perf_counter()))
    began = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                served.error = f"status {answer.status_code}"
            async for line in event_lines(answer):
                served.times += [time.perf_counter() - began] * num_tokens(line)
                if line.startswith(b'data: {"error"'):
                    served.error = line.decode()
    except httpx2.HTTPError as error:
        served.error = type(error).__name__
    return served

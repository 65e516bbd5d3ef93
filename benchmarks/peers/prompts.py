"""Prompts of random tokens: no two share a block, so that no prefix cache helps unless it is meant to. Pure."""

import random

from benchmarks.peers.budget import Budget
from benchmarks.peers.load import Request
from compose.bench.config import BenchServeConfig
from compose.bench.workload import Job, make_jobs

FIRST_ID, LAST_ID = 1_000, 40_000


class Prompts:
    """Draws prompts; each is new. Owned by one engine's part of a round."""

    def __init__(self, seed: str) -> None:
        self._draw = random.Random(seed)

    def tokens(self, length: int) -> list[int]:
        """Return a prompt of ``length`` token ids."""
        return self._draw.choices(range(FIRST_ID, LAST_ID), k=length)

    def chats(self, rate: float, budget: Budget) -> list[Request]:
        """Return the chats of one window: a Poisson process."""
        return self._requests(
            budget,
            request_rate=rate,
            input_len=budget.chat_prompt,
            output_len=budget.chat_answer,
            range_ratio=budget.chat_range,
        )

    def shared_prefixes(self, budget: Budget) -> list[Request]:
        """Return the requests of one window that begin with one of a few prefixes."""
        return self._requests(
            budget,
            dataset="prefix",
            request_rate=budget.prefix_rate,
            num_prefixes=budget.num_prefixes,
            prefix_len=budget.prefix,
            input_len=budget.chat_prompt // 2,
            output_len=budget.chat_answer // 2,
        )

    def injected(self, budget: Budget) -> list[Request]:
        """Return a long prompt for every second of a window, the first when chats sent at its start have begun."""
        times = [1.5 + second for second in range(max(1, int(budget.window_s - 1.5)))]
        return [Request(self.tokens(budget.injected_prompt), budget.injected_answer, at_s) for at_s in times]

    def _requests(self, budget: Budget, request_rate: float, **shape: object) -> list[Request]:
        count = max(1, round(request_rate * budget.window_s))
        config = BenchServeConfig(
            num_prompts=count,
            request_rate=request_rate,
            vocab_size=LAST_ID,
            seed=self._draw.randrange(2**31),
            **shape,  # type: ignore[arg-type]
        )
        return [_request(job) for job in make_jobs(config)]


def _request(job: Job) -> Request:
    return Request(job.prompt, job.output_len, job.at_s)

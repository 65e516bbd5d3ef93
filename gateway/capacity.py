"""Whether the cluster can serve a further request soon enough, and when to come back if not.

Two things can be short: time, when the prompts that wait would keep a first token past the target; and room, when the
sequences that run will grow into more KV blocks than there are. Both count from the moment a request is let in, so a
burst is seen at once, and what other gateways gave the workers is seen in their records. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import Overloaded
from common.messages import Role
from gateway.router import ASSUMED_TOKENS_PER_S, ClusterView, RouterLimits, WorkerView, usable

OVERCOMMIT = 2.0
"""Tokens that may be promised for each slot: sequences end at different times, and as many again may wait."""

ASSUMED_ANSWER_TOKENS = 128.0
ANSWER_SMOOTHING = 0.05
"""Weight of the newest answer in the moving average of their lengths."""

MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


@dataclass(slots=True, eq=False)
class Place:
    """One prompt that was let in."""

    prompt_tokens: int
    final_tokens: int
    """Prompt and answers, as long as they are expected to become."""
    is_read: bool = False


class Backlog:
    """What one gateway has let in and not yet seen the end of."""

    def __init__(self) -> None:
        self.unread_tokens = 0
        """Tokens of prompts whose first token has not come."""
        self.promised_tokens = 0
        self._answer_tokens = ASSUMED_ANSWER_TOKENS

    def expected(self, prompt_tokens: int, max_tokens: int, num_answers: int = 1) -> int:
        """Return how many tokens a prompt and its answers will probably have in the end."""
        return prompt_tokens + num_answers * min(max_tokens, math.ceil(self._answer_tokens))

    def enter(self, prompt_tokens: int, max_tokens: int, num_answers: int = 1) -> Place:
        """Let one prompt in."""
        place = Place(prompt_tokens, self.expected(prompt_tokens, max_tokens, num_answers))
        self.unread_tokens += place.prompt_tokens
        self.promised_tokens += place.final_tokens
        return place

    def read(self, place: Place) -> None:
        """Its first token has come; does nothing the second time."""
        if not place.is_read:
            place.is_read = True
            self.unread_tokens -= place.prompt_tokens

    def leave(self, place: Place) -> None:
        """It has ended; does nothing the second time."""
        self.read(place)
        self.promised_tokens -= place.final_tokens
        place.final_tokens = 0

    def answered(self, num_tokens: int) -> None:
        """An answer of this length is complete."""
        self._answer_tokens += ANSWER_SMOOTHING * (num_tokens - self._answer_tokens)


def check_time(view: ClusterView, limits: RouterLimits, backlog: Backlog, ttft_target_s: float) -> None:
    """Raise Overloaded when the prompts that wait already take longer than the target; 0 is no target.

    A prompt that is long by itself is served: only what is before it counts. Prompts may be read by either pool, and
    the router takes the one with less before it.
    """
    pools = [pool for role in (Role.PREFILL, Role.DECODE) if (pool := usable(view, role, limits))]
    if not pools or ttft_target_s == 0:
        return
    queued_s = min(sum(worker.queued_tokens for worker in pool) / _tokens_per_s(pool) for pool in pools)
    wait_s = max(queued_s, backlog.unread_tokens / sum(map(_tokens_per_s, pools)))
    if wait_s > ttft_target_s:
        raise Overloaded(
            f"a first token would take {wait_s:.0f} s, longer than the target of {ttft_target_s:g} s",
            retry_after_s=_retry_s(wait_s - ttft_target_s),
        )


def check_room(view: ClusterView, limits: RouterLimits, backlog: Backlog, needed_tokens: int) -> None:
    """Raise Overloaded when ``needed_tokens`` more would promise more KV than the decode workers can give.

    An idle cluster takes anything: a request that can never fit is refused for its length, not here.
    """
    writers = usable(view, Role.DECODE, limits)
    slots = sum(worker.record.blocks.total * worker.record.fingerprint.block_size for worker in writers)
    held = sum(worker.record.blocks.held * worker.record.fingerprint.block_size for worker in writers)
    promised = max(backlog.promised_tokens, held)
    if slots and promised and promised + needed_tokens > OVERCOMMIT * slots:
        raise Overloaded("the decode workers' KV memory is promised to others", retry_after_s=MIN_RETRY_S)


def _tokens_per_s(pool: Sequence[WorkerView]) -> float:
    return sum(worker.record.load.tokens_per_s or ASSUMED_TOKENS_PER_S for worker in pool)


def _retry_s(excess_s: float) -> float:
    return min(MAX_RETRY_S, max(MIN_RETRY_S, excess_s))

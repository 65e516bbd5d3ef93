"""Where a sequence is decoded, who computes its prompt, and why.

Pure: the view of the cluster and the time are arguments. Work counts from the decision on (the view holds what this
gateway has given out and what a worker's record says beyond that), so a burst is spread. The decode worker is chosen
first, by load, room and what it holds of the prompt. Then the predicted time to the first token chooses who computes
what it lacks: the tokens queued at a worker over its measured rate, the tokens that it would have to compute, and the
time to fetch what another worker holds. A turn of a chat whose history the decode worker holds is computed right there.
"""

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from common.ids import WorkerId
from common.messages import PeerPrefix, PlanKind, Role, WorkerRecord, WorkerState

STALE_AFTER_S = 2.0
"""A worker whose record was missing for this long, while Redis answered, is gone. (A flush empties Redis for up to one
heartbeat.)"""

FILL_WEIGHT = 0.15
"""How much more a full pool's worker costs than an empty one's."""

MISS_WEIGHT = 0.25
"""How much more a decode worker costs that holds nothing of the prompt than one that holds all of it. With FILL_WEIGHT
below 0.5, so that the busiest of equals never has 1.5 times the work of the idlest."""

IDLE_SEQUENCES = 4
"""A decode worker counts as having so many sequences more than it has, so that among workers with next to nothing to do
the one that holds the prompt is chosen."""

CONDITIONAL_FACTOR = 4
"""A decode worker that holds at least half of the prompt computes up to this many times ``local_prefill_tokens``, if it
is predicted to be no later than a prefill worker."""

INTERFERENCE = 0.25
"""Share by which each sequence that a decode worker has slows the prompts down that it computes."""

PROMPT_TOKENS = 64
"""What a prompt costs its worker besides its tokens, in tokens."""

ASSUMED_PULL_SPEEDUP = 10.0
"""How much faster blocks are pulled than computed, until it is measured."""

FETCH_S = 0.005
"""What a fetch from a peer costs besides its tokens."""

TIE = 0.01
"""Costs that differ by less than this share are equal."""

ASSUMED_TOKENS_PER_S = 1000.0
"""Prompt tokens a second of a worker that has not measured itself yet."""


NOBODY: Mapping[WorkerId, int] = {}
"""No worker holds anything of the prompt."""


class Reason(enum.StrEnum):
    """Why a prompt is computed where it is."""

    REMOTE = "remote"  # long enough to be worth a prefill worker
    SHORT_PROMPT = "short_prompt"  # few tokens
    CACHED = "cached"  # few tokens beyond what the decode worker holds
    NO_PREFILL_WORKER = "no_prefill_worker"  # none is ready
    INCOMPATIBLE = "incompatible"  # those that are ready hold another model or layout than the decode worker
    REDIS_UNAVAILABLE = "redis_unavailable"  # the queue cannot be reached
    PREFILL_BUSY = "prefill_busy"  # the wait would be longer than it is worth
    PREFILL_LATE = "prefill_late"  # the chosen prefill worker did not begin in time
    PREFILL_LOST = "prefill_lost"  # the chosen prefill worker is gone, and had begun


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a gateway knows of one worker."""

    record: WorkerRecord
    seen_at: float
    """When its record was last read."""
    connected: bool
    """A decode worker's session stands; of a prefill worker nothing is known, so True."""
    num_sequences: int
    """Running, waiting and on the way."""
    queued_tokens: int
    """Prompt tokens to compute, those on the way included."""

    @property
    def worker_id(self) -> WorkerId:
        """The worker's name."""
        return self.record.worker_id


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What a gateway knows of all workers."""

    workers: Sequence[WorkerView]
    polled_at: float
    """When Redis last answered."""
    redis_is_up: bool


@dataclass(frozen=True, slots=True)
class RouterLimits:
    """The operator's choices."""

    local_prefill_tokens: int
    max_prefill_wait_s: float
    max_tick_age_s: float


@dataclass(frozen=True, slots=True)
class PlanChoice:
    """Who computes a prompt."""

    kind: PlanKind
    reason: Reason
    prefill: WorkerView | None = None
    """Set when ``kind`` is remote."""
    wait_s: float = 0.0
    """Estimated seconds until the prompt would be computed there."""
    work_tokens: int = 0
    """What the prompt adds to the queue of whoever computes it."""
    peer: PeerPrefix | None = None
    """From whom that worker may pull what it lacks."""


def is_stale(view: ClusterView, worker: WorkerView) -> bool:
    """Whether Redis answers and no longer knows the worker."""
    return view.polled_at - worker.seen_at > STALE_AFTER_S


def is_stuck(worker: WorkerView, limits: RouterLimits) -> bool:
    """Whether the worker's step loop stands still although it has work."""
    return worker.record.load.tick_age_s > limits.max_tick_age_s


def usable(view: ClusterView, role: Role, limits: RouterLimits) -> list[WorkerView]:
    """Return the workers of ``role`` that may be given work now."""
    return [
        worker
        for worker in view.workers
        if worker.record.role is role
        and worker.record.state is WorkerState.READY
        and worker.connected
        and not is_stale(view, worker)
        and not is_stuck(worker, limits)
    ]


def choose_decode(
    view: ClusterView,
    num_tokens: int,
    *,
    limits: RouterLimits,
    resident: Mapping[WorkerId, int] = NOBODY,
    exclude: Collection[WorkerId] = (),
    draw: float = 0.0,
) -> WorkerView | None:
    """Return the decode worker for a sequence of ``num_tokens`` tokens so far, or None when there is none.

    Workers whose free blocks hold it go first; among them counts load, then what they hold of it (``resident``, in
    leading tokens) and how full they are. ``draw`` in [0, 1) decides between equals, so that several gateways do not
    all begin with the same one.
    """
    ready = [worker for worker in usable(view, Role.DECODE, limits) if worker.worker_id not in exclude]
    roomy = [worker for worker in ready if _has_room(worker, num_tokens)]
    priced = [(_decode_cost(worker, num_tokens, resident), worker) for worker in roomy or ready]
    return _cheapest(priced, draw)


def choose_plan(
    view: ClusterView,
    decode: WorkerView,
    *,
    num_tokens: int,
    cached_tokens: int,
    limits: RouterLimits,
    resident: Mapping[WorkerId, int] = NOBODY,
    exclude: Collection[WorkerId] = (),
    draw: float = 0.0,
) -> PlanChoice:
    """Return who computes a prompt of ``num_tokens``, of which ``decode`` holds the first ``cached_tokens``.

    ``resident`` says what the others hold of it.
    """
    missing = num_tokens - cached_tokens
    if missing <= limits.local_prefill_tokens:
        reason = Reason.CACHED if cached_tokens else Reason.SHORT_PROMPT
        return PlanChoice(PlanKind.LOCAL, reason, work_tokens=missing)
    held = _Holders(view, decode, limits, resident)
    here = held.forecast(decode, num_tokens, cached_tokens)
    ready = [worker for worker in usable(view, Role.PREFILL, limits) if worker.worker_id not in exclude]
    if not view.redis_is_up:
        return here.local(Reason.REDIS_UNAVAILABLE)
    if not ready:
        return here.local(Reason.NO_PREFILL_WORKER)
    matching = [worker for worker in ready if worker.record.fingerprint == decode.record.fingerprint]
    forecasts = {
        worker.worker_id: held.forecast(worker, num_tokens, resident.get(worker.worker_id, 0)) for worker in matching
    }
    prefill = _cheapest([(forecasts[worker.worker_id].ttft_s, worker) for worker in matching], draw)
    if prefill is None:
        return here.local(Reason.INCOMPATIBLE)
    there = forecasts[prefill.worker_id]
    if _is_short_turn(missing, cached_tokens, limits) and _slowed(here.ttft_s, decode) <= there.ttft_s:
        return PlanChoice(PlanKind.LOCAL, Reason.CACHED, work_tokens=missing)
    if there.ttft_s > limits.max_prefill_wait_s and here.ttft_s < there.ttft_s:
        return here.local(Reason.PREFILL_BUSY)
    return PlanChoice(PlanKind.REMOTE, Reason.REMOTE, prefill, there.ttft_s, there.work_tokens, there.peer)


@dataclass(frozen=True, slots=True)
class _Forecast:
    """What is predicted of one worker computing a prompt."""

    ttft_s: float
    work_tokens: int
    peer: PeerPrefix | None
    """Set when fetching from it is predicted to be faster than computing."""

    def local(self, reason: Reason) -> PlanChoice:
        """Return the plan that the decode worker, whose forecast this is, computes the prompt."""
        return PlanChoice(PlanKind.LOCAL, reason, work_tokens=self.work_tokens, peer=self.peer)


class _Holders:
    """Who could lend a prefix to whoever computes the prompt: the workers that hold most of it."""

    def __init__(
        self, view: ClusterView, decode: WorkerView, limits: RouterLimits, resident: Mapping[WorkerId, int]
    ) -> None:
        fit = [
            worker
            for role in Role
            for worker in usable(view, role, limits)
            if worker.record.fingerprint == decode.record.fingerprint and resident.get(worker.worker_id, 0)
        ]
        self._by_depth = sorted(fit, key=lambda worker: -resident[worker.worker_id])
        self._resident = resident

    def forecast(self, worker: WorkerView, num_tokens: int, own_tokens: int) -> _Forecast:
        """Predict what it takes ``worker``, which holds ``own_tokens``, to compute the rest of ``num_tokens``."""
        rate = _tokens_per_s(worker)
        own_tokens = min(own_tokens, num_tokens - 1)
        compute_s = (num_tokens - own_tokens) / rate
        queue_s = worker.queued_tokens / rate
        peer = next((other for other in self._by_depth if other.worker_id != worker.worker_id), None)
        if peer is None:
            return _Forecast(queue_s + compute_s, num_tokens - own_tokens + PROMPT_TOKENS, None)
        lent = min(self._resident[peer.worker_id], num_tokens - 1)
        pull_rate = worker.record.load.pull_tokens_per_s or rate * ASSUMED_PULL_SPEEDUP
        fetch_s = FETCH_S + (lent - own_tokens) / pull_rate + (num_tokens - lent) / rate
        if lent <= own_tokens or fetch_s >= compute_s:
            return _Forecast(queue_s + compute_s, num_tokens - own_tokens + PROMPT_TOKENS, None)
        record = peer.record
        source = PeerPrefix(record.worker_id, record.epoch, record.role, record.address, lent)
        return _Forecast(queue_s + fetch_s, int(fetch_s * rate) + PROMPT_TOKENS, source)


def _is_short_turn(missing: int, cached_tokens: int, limits: RouterLimits) -> bool:
    return cached_tokens >= missing and missing <= CONDITIONAL_FACTOR * limits.local_prefill_tokens


def _slowed(ttft_s: float, decode: WorkerView) -> float:
    return ttft_s * (1 + INTERFERENCE * decode.num_sequences)


def _has_room(worker: WorkerView, num_tokens: int) -> bool:
    blocks = worker.record.blocks
    needed = num_tokens // worker.record.fingerprint.block_size + 1
    return needed <= blocks.free + blocks.cached


def _decode_cost(worker: WorkerView, num_tokens: int, resident: Mapping[WorkerId, int]) -> float:
    blocks = worker.record.blocks
    fill = blocks.held / blocks.total if blocks.total else 1.0
    missing = 1 - min(1.0, resident.get(worker.worker_id, 0) / max(1, num_tokens))
    return (worker.num_sequences + IDLE_SEQUENCES) * (1 + FILL_WEIGHT * fill + MISS_WEIGHT * missing)


def _tokens_per_s(worker: WorkerView) -> float:
    return worker.record.load.tokens_per_s or ASSUMED_TOKENS_PER_S


def _cheapest(priced: Sequence[tuple[float, WorkerView]], draw: float) -> WorkerView | None:
    if not priced:
        return None
    best = min(cost for cost, _ in priced)
    equals = [worker for cost, worker in priced if cost <= best * (1 + TIE)]
    return equals[int(draw * len(equals))]

"""What a simulated or measured run was worth: goodput, tails, and which pool held it back. Pure."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from compose.tune.cluster import Run
from compose.tune.request import SimRequest
from gateway.planner.pressure import Targets
from gateway.planner.ratio import Ratio

ENOUGH = 0.99
"""Share of good answers from which on nothing counts as a bottleneck."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One ratio under one load."""

    ratio: Ratio
    goodput: float
    """Good answers a second: the first token within its target, and the mean time between tokens too."""
    good_share: float
    ttft_p50_s: float
    ttft_p95_s: float
    itl_p50_s: float
    itl_p95_s: float
    queue_s: float
    """Mean seconds that the queued prompts would take."""
    kv_use: float
    """Highest share of the decode workers' blocks that was held."""
    bottleneck: str
    """``prefill``, ``decode``, ``both`` or ``none``."""


def is_good(request: SimRequest, targets: Targets) -> bool:
    """Whether the answer is complete and met both targets."""
    return request.num_left == 0 and request.ttft_s <= targets.ttft_s and request.itl_s <= targets.itl_s


def outcome(run: Run, ratio: Ratio, targets: Targets, seconds: float) -> Outcome:
    """Return what ``run``, whose requests arrived within ``seconds``, was worth."""
    begun = [request for request in run.requests if request.token_times]
    gaps = [gap for request in begun for gap in request.gaps()]
    ttfts = [request.ttft_s for request in begun]
    num_good = sum(is_good(request, targets) for request in run.requests)
    share = num_good / max(1, len(run.requests))
    return Outcome(
        ratio=ratio,
        goodput=num_good / seconds,
        good_share=share,
        ttft_p50_s=percentile(ttfts, 0.5),
        ttft_p95_s=percentile(ttfts, 0.95),
        itl_p50_s=percentile(gaps, 0.5),
        itl_p95_s=percentile(gaps, 0.95),
        queue_s=statistics.fmean([seen.prefill_wait * targets.ttft_s for seen in run.pressures] or [0.0]),
        kv_use=max((seen.kv_use for seen in run.pressures), default=0.0),
        bottleneck=_bottleneck(run.requests, targets) if share < ENOUGH else "none",
    )


def best(outcomes: Sequence[Outcome], targets: Targets) -> Outcome:
    """Return the outcome with most goodput; among those within one percent, the one farthest from its targets."""
    most = max(one.goodput for one in outcomes)
    return min((one for one in outcomes if one.goodput >= most * 0.99), key=lambda one: strain(one, targets))


def strain(one: Outcome, targets: Targets) -> float:
    """Return how close the tails come to the targets; 1 is there."""
    return max(one.ttft_p95_s / targets.ttft_s, one.itl_p95_s / targets.itl_s)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of all do not exceed; infinite for none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.inf


def _bottleneck(requests: Sequence[SimRequest], targets: Targets) -> str:
    """Say which target was missed more: a late first token is the prefill pool's, slow ones the decode pool's."""
    late = sum(not request.token_times or request.ttft_s > targets.ttft_s for request in requests)
    slow = sum(bool(request.token_times) and request.itl_s > targets.itl_s for request in requests)
    if min(late, slow) * 2 >= max(late, slow):
        return "both"
    return "prefill" if late > slow else "decode"

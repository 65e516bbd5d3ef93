"""Runs the planner in one gateway: looks every second, shows the pressures, and, with the right, decides and acts.

Every gateway looks. The one that holds the right to change roles plans for all and publishes what it decided; the
others follow its threshold. A change of a worker's role runs beside the looks, and the right is renewed meanwhile.
Redis away: nobody plans, and the threshold stays as it is.
"""

import asyncio
import logging
import socket
import time
from collections import deque

from redis.asyncio import Redis

from common.errors import BatonError
from common.messages import PlannerState, PlannerStep
from common.redis_client import RedisUnavailable
from gateway.config import GatewayConfig
from gateway.planner.board import PlannerBoard
from gateway.planner.changer import RatioChanger
from gateway.planner.metrics import PlannerMetrics
from gateway.planner.planner import Action, Decision, Planner
from gateway.planner.pressure import Pressure, Targets, look
from gateway.planner.ratio import live
from gateway.planner.right import RoleRight
from gateway.workers.cluster import Cluster

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks."""

MAX_STEPS = 32
"""Decisions that are kept for people."""


class PlannerRunner:
    """Owns this gateway's planner and its claim to the right. Runs on the event loop."""

    def __init__(
        self, config: GatewayConfig, cluster: Cluster, redis: Redis, changer: RatioChanger, metrics: PlannerMetrics
    ) -> None:
        self.mode = config.planner
        self.state: PlannerState | None = None
        """What the gateway that plans has published last, as far as this one knows."""
        self._targets = Targets(config.planner_ttft_s, config.planner_itl_s)
        self._drain_s = config.planner_drain_s
        self._home_tokens = config.local_prefill_tokens
        self._cluster = cluster
        self._changer = changer
        self._metrics = metrics
        self._board = PlannerBoard(redis)
        self._right = RoleRight(redis, is_planner=True)
        self._name = f"{socket.gethostname()}:{config.port}"
        self._planner = Planner(config.local_prefill_tokens)
        self._fence: int | None = None
        self._change: asyncio.Task[None] | None = None
        self._steps: deque[PlannerStep] = deque(maxlen=MAX_STEPS)
        self._last: tuple[Action, str] | None = None

    def pressure(self) -> Pressure:
        """Return how hard the pools are pressed now."""
        return look(self._cluster.view(), self._cluster.limits, self._targets, asyncio.get_running_loop().time())

    async def run(self) -> None:
        """Look until cancelled; then the right is given back, and a change that runs is left to its worker."""
        try:
            while True:
                seen = self.pressure()
                self._metrics.looked(seen, self._cluster.limits.local_prefill_tokens, plans=self._fence is not None)
                if self.mode != "off":
                    await self._turn(seen)
                await asyncio.sleep(LOOK_S)
        finally:
            await self._end()

    async def _turn(self, seen: Pressure) -> None:
        try:
            if await self._may_plan():
                await self._plan(seen)
            else:
                self._follow(await self._board.state())
        except RedisUnavailable as error:
            if self._fence is not None:
                log.warning("planning pauses, Redis cannot be reached: %s", error)
            self._fence = None

    async def _may_plan(self) -> bool:
        """Keep the right or try to get it; return whether this gateway has it."""
        if self._fence is not None:
            if await self._right.renew():
                return True
            log.info("the right to change roles was lost")
            self._fence = None
        if self._change is not None:
            return False  # ordered under the lost right: wait for its end
        self._fence = await self._right.acquire()
        if self._fence is not None:
            await self._take_office()
        return self._fence is not None

    async def _take_office(self) -> None:
        log.info("this gateway plans the ratio (%s)", self.mode)
        state = await self._board.state()
        if state is not None:
            self._steps.extend(step for step in state.steps if step not in self._steps)
            self._planner.local_prefill_tokens = state.local_prefill_tokens
        self._planner.home = await self._board.home() or self._planner.home
        self._planner.forget(asyncio.get_running_loop().time())

    async def _plan(self, seen: Pressure) -> None:
        now = asyncio.get_running_loop().time()
        decision = self._planner.decide(seen, now)
        self._metrics.decided(decision)
        acts = decision.action is not Action.HOLD
        if not acts or self.mode == "advise":
            self._note(decision, "advised" if acts else "")
        else:
            self._planner.begun(decision, now)
            self._note(decision, "begun" if decision.role else "done")
            if decision.role is not None:
                assert self._fence is not None
                self._change = asyncio.create_task(self._carry_out(decision, self._fence))
        self._follow(self._state())
        assert self.state is not None
        await self._board.publish(self.state)

    async def _carry_out(self, decision: Decision, fence: int) -> None:
        """Change one worker's role."""
        loop = asyncio.get_running_loop()
        role, began = decision.role, loop.time()
        assert role is not None
        try:
            workers = live(self._cluster.view())
            change = await self._changer.change_one(workers, role, fence, self._drain_s)
        except BatonError as error:
            log.warning("no worker became a %s worker: %s", role, error.message)
            self._planner.ended(loop.time(), loop.time() - began, well=False)
            self._note(decision, error.message)
        else:
            self._planner.ended(loop.time(), change.seconds, well=True)
            self._note(decision, f"{change.worker} done in {change.seconds:.2f} s")
        finally:
            self._change = None

    def _note(self, decision: Decision, outcome: str) -> None:
        """Keep and log a decision with its inputs; of equal ones in a row only the first."""
        what = (decision.action, f"{decision.reason} {outcome}")
        if what == self._last:
            return
        self._last = what
        seen = decision.seen
        log.info(
            "planner: %s, %s%s; ratio %s, prefill %.2f (wait %.2f, busy %.2f), decode %.2f (kv %.2f, itl %.2f, "
            "admission %.2f), donor after %.2f, local up to %d tokens%s",
            *(decision.action, decision.reason, f", {outcome}" if outcome else "", seen.ratio),
            *(decision.prefill, seen.prefill_wait, seen.prefill_busy),
            *(decision.decode, seen.kv_use, seen.itl, seen.admission),
            *(decision.donor_after, decision.local_prefill_tokens),
            f"; unknown: {seen.missing}" if seen.missing else "",
        )
        self._steps.append(_step(decision, outcome))

    def _state(self) -> PlannerState:
        home = self._planner.home
        tokens = self._planner.local_prefill_tokens
        return PlannerState(self._name, self.mode, str(home or ""), tokens, tuple(self._steps))

    def _follow(self, state: PlannerState | None) -> None:
        self.state = state
        tokens = self._home_tokens if state is None else state.local_prefill_tokens
        if tokens != self._cluster.limits.local_prefill_tokens:
            self._cluster.set_local_prefill_tokens(tokens)

    async def _end(self) -> None:
        if self._change is not None:
            self._change.cancel()
        if self._fence is not None:
            try:
                await self._right.release()
            except RedisUnavailable as error:
                log.warning("the right to change roles was not given back, it will expire: %s", error)


def _step(decision: Decision, outcome: str) -> PlannerStep:
    return PlannerStep(
        at_s=time.time_ns() // 1_000_000_000,
        action=decision.action,
        reason=decision.reason,
        ratio=str(decision.seen.ratio),
        prefill=round(decision.prefill, 3),
        decode=round(decision.decode, 3),
        donor_after=round(decision.donor_after, 3),
        local_prefill_tokens=decision.local_prefill_tokens,
        outcome=outcome,
    )

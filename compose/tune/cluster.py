"""A simulated cluster: the real router, tallies, planner and ratio rules over simulated workers and a virtual clock.

A request is routed as :mod:`gateway.request.flow` does it: a decode worker is chosen, says what it holds, then who
reads the prompt is decided; the first token comes from whoever read it, and the blocks follow. Workers' records are as
old as their heartbeats make them. Not simulated: prefixes pulled from peers, refusals at the door, faults.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from common.ids import WorkerId
from common.messages import Role, WorkerState
from common.registry import HEARTBEAT_S
from compose.tune.clock import VirtualClock
from compose.tune.profile import CostProfile
from compose.tune.request import SimRequest
from compose.tune.trace import Arrival
from compose.tune.worker import SimWorker, slowness
from gateway.planner.planner import Action, Decision, Planner
from gateway.planner.pressure import Pressure, Targets, look
from gateway.planner.ratio import Ratio, choose_donor, live
from gateway.router import ClusterView, PlanChoice, Reason, RouterLimits, choose_decode, choose_plan
from gateway.workers.cluster import Member

LOOK_S = 1.0
"""The planner looks, and samples are taken, this often."""

RETRY_S = 0.5
"""Without a decode worker that takes work, another try is made after this long."""

OVERTIME_S = 120.0
"""So long after the last arrival the simulation ends, whatever is left."""

MAX_TICK_AGE_S, MAX_PREFILL_WAIT_S = 60.0, 20.0


@dataclass(slots=True, eq=False)
class _Flow:
    """Where one request is."""

    decode: SimWorker
    owner: Member
    """The decode worker, as the gateway counts what it gave it."""
    prefill: SimWorker | None = None
    reader: Member | None = None
    """Who has the prompt to read, until it is read."""
    work_tokens: int = 0
    """What that was counted as."""
    read_at: float | None = None
    """When the prefill worker had the first token."""
    num_read: int = 0
    """Tokens whose blocks the prefill worker has."""


@dataclass(frozen=True, slots=True)
class RoleChange:
    """One worker that took another role."""

    at_s: float
    worker: WorkerId
    role: Role
    seconds: float


@dataclass(slots=True)
class Run:
    """What a simulation brought."""

    requests: list[SimRequest]
    pressures: list[Pressure] = field(default_factory=list)
    """One a second."""
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    """Those that were more than to hold."""
    changes: list[RoleChange] = field(default_factory=list)


class SimCluster:
    """Owns the clock, the workers and the requests of one run; with ``plans`` the planner changes roles."""

    def __init__(
        self,
        profile: CostProfile,
        ratio: Ratio,
        targets: Targets,
        *,
        local_prefill_tokens: int = 64,
        plans: bool = False,
        drain_s: float = 10.0,
        seed: int = 0,
    ) -> None:
        self._profile = profile
        self._targets = targets
        self._drain_s = drain_s
        self._clock = VirtualClock()
        self._draw = random.Random(seed)
        self._limits = RouterLimits(local_prefill_tokens, MAX_PREFILL_WAIT_S, MAX_TICK_AGE_S)
        self._planner = Planner(local_prefill_tokens) if plans else None
        roles = [(Role.PREFILL, number) for number in range(ratio.prefill)]
        roles += [(Role.DECODE, number) for number in range(ratio.decode)]
        workers = [SimWorker(f"{role}-{n}", role, profile, self._clock, self, self._slowness) for role, n in roles]
        self._workers = {worker.name: worker for worker in workers}
        self._members = {name: Member(worker.record(), 0.0, None) for name, worker in self._workers.items()}
        self._flows: dict[SimRequest, _Flow] = {}
        self._num_left = 0
        self._run = Run([])

    def run(self, arrivals: Sequence[Arrival]) -> Run:
        """Serve ``arrivals`` and return what came of them."""
        requests = [SimRequest(n, arrival, arrival.token_ids(n)) for n, arrival in enumerate(arrivals)]
        self._run = Run(requests)
        self._num_left = len(requests)
        for request in requests:
            self._clock.at(request.arrival.at_s + self._profile.local_overhead_s, partial(self._route, request))
        for number, name in enumerate(self._workers):
            self._clock.at(HEARTBEAT_S * number / len(self._workers), partial(self._beat, name))
        self._clock.at(LOOK_S, self._look)
        last_s = arrivals[-1].at_s if arrivals else 0.0
        self._clock.run(last_s + OVERTIME_S, lambda: self._num_left == 0)
        return self._run

    def workers(self) -> list[SimWorker]:
        """Return the workers, in whatever role."""
        return list(self._workers.values())

    # ---- a request ----

    def _route(self, request: SimRequest) -> None:
        token_ids, view = request.token_ids, self._view()
        held = {name: worker.held_tokens(token_ids) for name, worker in self._workers.items()}
        chosen = choose_decode(view, len(token_ids), limits=self._limits, resident=held, draw=self._draw.random())
        if chosen is None:
            self._clock.after(RETRY_S, partial(self._route, request))
            return
        flow = _Flow(self._workers[chosen.worker_id], self._members[chosen.worker_id])
        self._flows[request] = flow
        flow.owner.sequences.add(1)
        cached = flow.decode.accept(request)
        choice = choose_plan(
            self._view(),
            chosen,
            num_tokens=len(token_ids),
            cached_tokens=cached,
            limits=self._limits,
            resident=held,
            draw=self._draw.random(),
        )
        self._have_read(request, flow, choice)

    def _have_read(self, request: SimRequest, flow: _Flow, choice: PlanChoice) -> None:
        name = flow.decode.name if choice.prefill is None else choice.prefill.worker_id
        flow.reader, flow.work_tokens = self._members[name], choice.work_tokens
        flow.reader.tokens.add(flow.work_tokens)
        if choice.prefill is None:
            flow.decode.compute_here(request, gently=choice.reason is Reason.PREFILL_BUSY)
            return
        flow.prefill = self._workers[name]
        flow.decode.expect(request)
        ahead_s = max(0.0, self._profile.remote_overhead_s - self._profile.local_overhead_s)
        self._clock.after(ahead_s, partial(self._queue, request, flow))

    def _queue(self, request: SimRequest, flow: _Flow) -> None:
        if not self._is_in(request, flow) or flow.prefill is None:
            return
        if flow.prefill.role is Role.PREFILL and flow.prefill.state is WorkerState.READY:
            flow.prefill.read(request)
        else:  # it has begun to change meanwhile
            self._move(request)

    def begun(self, request: SimRequest) -> None:
        """See :class:`compose.tune.worker.Listener`."""
        self._clock.at(self._clock.now, partial(self._offer, request, self._flows[request]))

    def _offer(self, request: SimRequest, flow: _Flow) -> None:
        if self._is_in(request, flow):
            flow.decode.offered(request)

    def read_to_end(self, request: SimRequest) -> None:
        """See :class:`compose.tune.worker.Listener`."""
        flow = self._flows[request]
        flow.read_at, flow.num_read = self._clock.now, len(request.token_ids)
        self._hand_over(request, flow)

    def has_room(self, request: SimRequest) -> None:
        """See :class:`compose.tune.worker.Listener`."""
        self._clock.at(self._clock.now, partial(self._hand_over, request, self._flows[request]))

    def _hand_over(self, request: SimRequest, flow: _Flow) -> None:
        """Give the first token to the client, and the blocks to the decode worker, once both sides are ready."""
        if not self._is_in(request, flow) or flow.read_at is None:
            return
        is_last = request.num_left == 1
        if not is_last and not flow.decode.is_pulling(request):
            return
        flow.read_at = None
        self._write(request)
        if request.num_left:
            transfer_s = self._profile.transfer_base_s + self._profile.transfer_token_s * flow.num_read
            self._clock.after(transfer_s, partial(self._blocks_came, request, flow))

    def _blocks_came(self, request: SimRequest, flow: _Flow) -> None:
        if self._is_in(request, flow) and flow.prefill is not None:
            flow.decode.pulled(request, flow.num_read)
            flow.prefill.release(request)
            flow.prefill = None

    def wrote(self, request: SimRequest) -> None:
        """See :class:`compose.tune.worker.Listener`."""
        self._write(request)

    def _write(self, request: SimRequest) -> None:
        self._was_read(self._flows[request])
        request.write(self._clock.now)
        if request.sequence is not None:
            request.sequence.token_ids.append(request.token_ids[-1])
        if request.num_left == 0:
            self._leave(request)
            self._num_left -= 1

    def _was_read(self, flow: _Flow) -> None:
        if flow.reader is not None:
            flow.reader.tokens.remove(flow.work_tokens)
            flow.reader = None

    def _leave(self, request: SimRequest) -> None:
        flow = self._flows.pop(request)
        flow.owner.sequences.remove(1)
        self._was_read(flow)
        flow.decode.leave(request)
        if flow.prefill is not None:
            flow.prefill.release(request)

    def _move(self, request: SimRequest) -> None:
        """Go on somewhere else with what there is."""
        self._leave(request)
        request.num_moves += 1
        self._route(request)

    def _is_in(self, request: SimRequest, flow: _Flow) -> bool:
        return self._flows.get(request) is flow

    # ---- the workers ----

    def _slowness(self, worker: SimWorker) -> float:
        return slowness(worker, self._workers.values(), self._profile)

    def _beat(self, name: WorkerId) -> None:
        self._publish(name)
        self._clock.after(HEARTBEAT_S, partial(self._beat, name))

    def _publish(self, name: WorkerId) -> None:
        record, member = self._workers[name].record(), self._members[name]
        if record.role is member.record.role:
            member.seen(record, self._clock.now)
            return
        self._members[name] = Member(record, self._clock.now, None)  # another life; nothing was given to it yet

    def _view(self) -> ClusterView:
        for member in self._members.values():
            member.seen_at = self._clock.now
        return ClusterView(tuple(member.view() for member in self._members.values()), self._clock.now, True)

    # ---- the planner ----

    def _look(self) -> None:
        now, view = self._clock.now, self._view()
        seen = look(view, self._limits, self._targets, now)
        self._run.pressures.append(seen)
        if self._planner is not None:
            decision = self._planner.decide(seen, now)
            if decision.action is not Action.HOLD:
                self._run.decisions.append((now, decision))
                self._planner.begun(decision, now)
                self._act(decision, view)
        self._clock.after(LOOK_S, self._look)

    def _act(self, decision: Decision, view: ClusterView) -> None:
        limits = self._limits
        tokens = decision.local_prefill_tokens
        self._limits = RouterLimits(tokens, limits.max_prefill_wait_s, limits.max_tick_age_s)
        if decision.role is None:
            return
        donor = choose_donor(live(view), Role.DECODE if decision.role is Role.PREFILL else Role.PREFILL)
        assert donor is not None
        worker = self._workers[donor.worker_id]
        worker.state = WorkerState.DRAINING
        self._publish(worker.name)
        if worker.role is Role.PREFILL:
            for request in [one for one in worker.requests() if not worker.has_begun(one)]:
                self._move(request)
        self._drain(worker, decision.role, self._clock.now)

    def _drain(self, worker: SimWorker, role: Role, began_s: float) -> None:
        """Look every tenth of a second whether ``worker`` is empty; when its time is over, move what is left."""
        if self._clock.now - began_s >= self._drain_s:
            for request in worker.requests():
                self._move(request)
        if worker.is_empty and not worker.is_stepping:
            self._clock.after(self._profile.change_s, partial(self._changed, worker, role, began_s))
        else:
            self._clock.after(0.1, partial(self._drain, worker, role, began_s))

    def _changed(self, worker: SimWorker, role: Role, began_s: float) -> None:
        worker.change(role)
        self._publish(worker.name)
        seconds = self._clock.now - began_s
        self._run.changes.append(RoleChange(self._clock.now, worker.name, role, seconds))
        if self._planner is not None:
            self._planner.ended(self._clock.now, seconds, well=True)

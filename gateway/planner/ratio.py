"""How many workers have which role, and which of them is the one to change. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import InvalidRequest
from common.messages import Role, WorkerState
from gateway.router import ClusterView, WorkerView, is_stale


@dataclass(frozen=True, slots=True)
class Ratio:
    """Prefill workers to decode workers."""

    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}"

    @property
    def total(self) -> int:
        """All workers."""
        return self.prefill + self.decode

    def moved(self, to: Role) -> "Ratio":
        """Return the ratio after one worker has taken the role ``to``."""
        step = 1 if to is Role.PREFILL else -1
        return Ratio(self.prefill + step, self.decode - step)


def parse_ratio(text: str) -> Ratio:
    """Return the ratio that ``text``, such as ``1:3``, names; raises InvalidRequest."""
    found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", text.strip())
    if found is None:
        raise InvalidRequest("ratio must be PREFILL:DECODE, such as 1:3", param="ratio")
    ratio = Ratio(int(found[1]), int(found[2]))
    if ratio.prefill < 1 or ratio.decode < 1:
        raise InvalidRequest("ratio must leave at least one worker of each role", param="ratio")
    return ratio


def live(view: ClusterView) -> list[WorkerView]:
    """Return the workers that the registry knows."""
    return [worker for worker in view.workers if not is_stale(view, worker)]


def ratio_of(workers: Sequence[WorkerView]) -> Ratio:
    """Return the ratio of these workers, whatever their state."""
    roles = [worker.record.role for worker in workers]
    return Ratio(roles.count(Role.PREFILL), roles.count(Role.DECODE))


def is_settled(workers: Sequence[WorkerView]) -> bool:
    """Whether every worker is ready, so that none is on its way out or into another role."""
    return all(worker.record.state is WorkerState.READY and worker.connected for worker in workers)


def choose_donor(workers: Sequence[WorkerView], role: Role) -> WorkerView | None:
    """Return the worker of ``role`` that is quickest to take the other one: it has least to finish or to hand over."""
    able = [one for one in workers if one.record.role is role and one.record.state is WorkerState.READY]
    return min(
        able,
        key=lambda one: (one.queued_tokens if role is Role.PREFILL else one.num_sequences, one.record.blocks.held),
        default=None,
    )

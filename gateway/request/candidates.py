"""Which decode worker is asked next for one prompt, and what its client is told when none takes it."""

import asyncio
import random
from collections.abc import Mapping

from common.errors import BatonError, Overloaded, Unavailable
from common.ids import WorkerId
from gateway.router import WorkerView, choose_decode
from gateway.workers.cluster import LOOK_AGAIN_S, Cluster


class Candidates:
    """Remembers who said no. Owned by one flow; times are of the event loop's clock."""

    def __init__(self, cluster: Cluster, *, wait_until: float) -> None:
        self._cluster = cluster
        self._wait_until = wait_until
        self._tried: set[WorkerId] = set()
        self._refusals: list[BatonError] = []
        self._has_moved = False

    async def next(self, num_tokens: int, resident: Mapping[WorkerId, int]) -> WorkerView:
        """Return the one to ask for a prompt of ``num_tokens``, of which workers hold ``resident``.

        Waits for one to become ready, within the time given. Raises what the client is to be told if there is none.
        """
        while True:
            worker = choose_decode(
                self._cluster.view(),
                num_tokens,
                limits=self._cluster.limits,
                resident=resident,
                exclude=self._tried,
                draw=random.random(),
            )
            if worker is not None:
                return worker
            if asyncio.get_running_loop().time() >= self._wait_until or self._is_turned_away:
                raise self._nobody()
            await self._cluster.wait_changed(LOOK_AGAIN_S)
            self._tried.clear()

    def refused(self, worker: WorkerView, error: BatonError) -> None:
        """Note that ``worker`` did not take the prompt."""
        self._refusals.append(error)
        self._tried.add(worker.worker_id)

    def lost(self, worker: WorkerView, error: BatonError, *, wait_until: float) -> None:
        """Note that ``worker`` had the prompt and gave it up; begin anew without it."""
        self._has_moved = True
        self._refusals = [Unavailable(error.message)]
        self._tried = {worker.worker_id}
        self._wait_until = wait_until

    @property
    def _is_turned_away(self) -> bool:
        """Whether workers are there, and one said no for another reason than its state: waiting would not change it."""
        return not self._has_moved and any(not isinstance(error, Unavailable) for error in self._refusals)

    def _nobody(self) -> BatonError:
        """Return the error when nobody took it: what most of them said, load first."""
        for kind in (Overloaded, Unavailable):
            for error in self._refusals:
                if isinstance(error, kind):
                    return kind(error.message, retry_after_s=error.retry_after_s or 1.0)
        if self._refusals:
            return self._refusals[0]
        return Unavailable("no decode worker is ready", retry_after_s=1.0)

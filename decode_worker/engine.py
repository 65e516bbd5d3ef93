"""The decode role: owns sequences, pulls or computes their prompts, and writes their answers.

Life of a sequence: accepted (its gateway has Accepted) -> planned, local or remote -> has its blocks, from its own
prefix cache, by pulling and by computing -> one token a step -> finished, aborted or failed. Of several samples of a
prompt, the prompt goes this way as a sequence of its own; when it is computed the samples fork from it, and it ends.
Everything but the steps runs on the event loop. Blocks that a running step or a pull may still write to are given back
when that has ended.

    gateways         sessions -> intake (Submit), plans (Plan), answers (Abort)
    prefill workers  pulls -> transfers (who expects what)
    step loop        scheduler decides -> pulls begin, a step is computed -> answers take its tokens
    all of them      roster (who is here)
"""

import asyncio
from collections.abc import Iterable

from common.errors import Unavailable
from common.ids import TransferId
from common.messages import SequenceReport, SlotCounts, WorkerLoad
from common.rpc import Handlers
from common.services import OFFER, SESSION
from common.sizes import parse_size
from decode_worker.answers import Answers
from decode_worker.forks import Forks
from decode_worker.intake import Intake
from decode_worker.plans import Plans
from decode_worker.pulls import Pulls
from decode_worker.roster import Roster
from decode_worker.scheduler import DecodeScheduler
from decode_worker.sessions import Sessions
from decode_worker.step_loop import StepLoop
from decode_worker.swap import SwapSpace
from decode_worker.transfers import Transfers
from kvstore.block_table import BlockTable
from kvstore.host.parts import Parts
from kvstore.outgoing import ReleaseReason


class DecodeEngine:
    """Puts the parts of the role together, and is what the host asks. Runs on the event loop."""

    def __init__(self, parts: Parts) -> None:
        config, pool = parts.config, parts.model.pool
        wake = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._stepper = parts.new_stepper()
        self._meter = self._stepper.meter
        self._swap = SwapSpace(
            parts.model.storage,
            config.preemption,
            parse_size(config.swap_memory, flag="--swap-memory"),
            lambda: self._meter.prompt_tokens_per_s,
        )
        self._scheduler = DecodeScheduler(
            pool,
            max_num_seqs=config.max_num_seqs,
            token_budget=config.token_budget,
            local_chunk_tokens=config.local_chunk_tokens,
            ageing_s=config.priority_ageing_s,
            saves=self._swap.is_preferred,
        )
        scheduler = self._scheduler
        self._roster = Roster(pool, scheduler, self._stepper, self._swap, wake)
        transfers = Transfers(parts.puller)
        self._answers = Answers(self._roster, Forks(scheduler, self._roster, parts.new_table), transfers)
        self._pulls = Pulls(parts, scheduler, self._roster, transfers, self._answers, self._group, wake)
        plans = Plans(parts, self._meter, scheduler, self._roster, transfers, self._group, wake)
        self._intake = Intake(parts, self._roster)
        self._sessions = Sessions(parts.model.grammars, self._roster, self._intake, plans, self._answers, self._group)
        self._loop = StepLoop(
            parts, scheduler, self._stepper, self._swap, self._roster, self._pulls, self._answers, wake
        )

    def handlers(self) -> Handlers:
        """Return what gateways and prefill workers call."""
        return Handlers(unary={OFFER: self._pulls.offered}, stream={}, bidi={SESSION: self._sessions.serve})

    async def run(self) -> None:
        """Work until cancelled."""
        async with self._group:
            await self._loop.run()

    async def drain(self) -> None:
        """Refuse new sequences; return when the last has ended."""
        self._intake.close()
        await self._roster.wait_empty()

    async def hand_back(self) -> None:
        """Give up every sequence, so that its gateway moves it, and end the sessions."""
        for request in self._roster.requests():
            self._answers.give_up(request, Unavailable("the decode worker takes another role"))
        self._sessions.close()
        await self._roster.wait_released()

    def released(self, transfer_id: TransferId, reason: ReleaseReason) -> None:
        """A decode worker hands nothing over; what it lends is the lender's."""

    def load(self, now: float) -> WorkerLoad:
        """Return the load at ``now``."""
        return WorkerLoad(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            queued_tokens=self._scheduler.num_queued_tokens,
            tokens_per_s=self._meter.prompt_tokens_per_s,
            tick_age_s=self._meter.tick_age_s(now),
            busy=self._meter.busy(now),
            itl_s=self._meter.itl_s,
            admission_wait_s=self._admission_wait_s(now),
        )

    def _admission_wait_s(self, now: float) -> float:
        waiting = self._scheduler.first_without_room()
        since = None if waiting is None else self._roster.owner(waiting).ready_at
        return 0.0 if since is None else max(0.0, now - since)

    def slots(self) -> SlotCounts:
        """Return the slots of all sequences' blocks, and how many hold a token or will when it is computed."""
        sequences = [sequence for sequence in self._scheduler.sequences() if sequence.table.block_ids]
        allocated = sum(sequence.table.num_slots for sequence in sequences)
        return SlotCounts(allocated, sum(min(sequence.num_tokens, sequence.table.num_slots) for sequence in sequences))

    def tables(self) -> Iterable[BlockTable]:
        """Return every table that holds blocks."""
        return self._roster.tables()

    def sequences(self) -> Iterable[SequenceReport]:
        """Return every sequence with its stage; one that only waits for a pull to end is ``leaving``."""
        return self._roster.reports()

    def counters(self) -> dict[str, int]:
        """Return counts since the start."""
        return (
            self._answers.counters()
            | self._pulls.counters()
            | self._intake.counters()
            | self._loop.counters()
            | self._swap.counters()
            | {"preemptions": self._scheduler.num_preemptions}
        )


def create(parts: Parts) -> DecodeEngine:
    """Return the engine of the decode role."""
    return DecodeEngine(parts)

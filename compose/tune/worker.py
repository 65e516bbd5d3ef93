"""A simulated worker: the real schedulers, block pool and step meter, with steps that take what a profile says."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from common.ids import Epoch, RequestId, WorkerId
from common.messages import Fingerprint, Role, SlotCounts, WorkerLoad, WorkerRecord, WorkerState
from common.sampling import SamplingParams
from compose.tune.clock import VirtualClock
from compose.tune.profile import CostProfile
from compose.tune.request import SimRequest
from decode_worker.scheduler import DecodeScheduler
from decode_worker.slots import Stage
from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockTable
from kvstore.host.meter import StepMeter
from kvstore.prefix_hash import PrefixHasher, root_hash
from kvstore.retention import LeastRecentlyUsed
from kvstore.sequence import Chunk
from kvstore.sequence import Sequence as Seq
from prefill_worker.scheduler import PrefillScheduler

Slowness = Callable[["SimWorker"], float]
"""How many times longer a step of this worker takes that begins now than one on a worker alone."""


class Listener(Protocol):
    """What a worker tells the cluster about a request."""

    def begun(self, request: SimRequest) -> None:
        """Its prefill worker has begun to read."""

    def has_room(self, request: SimRequest) -> None:
        """Its decode worker has blocks for it and pulls."""

    def read_to_end(self, request: SimRequest) -> None:
        """Its prefill worker has the first token."""

    def wrote(self, request: SimRequest) -> None:
        """Its decode worker has the next token."""


class SimWorker:
    """One worker of a simulated cluster. ``told`` hears what happens to requests; ``slow`` says what others cost it."""

    def __init__(
        self, name: str, role: Role, profile: CostProfile, clock: VirtualClock, told: Listener, slow: Slowness
    ) -> None:
        self.name = WorkerId(name)
        self.role = role
        self.epoch = Epoch(1)
        self.state = WorkerState.READY
        self.is_stepping = False
        self.pool = BlockPool(profile.kv_blocks, profile.block_size, LeastRecentlyUsed(profile.kv_blocks // 2))
        self._profile = profile
        self._clock = clock
        self._told = told
        self._slow = slow
        self._meter = StepMeter(profile.prompt_tokens_per_s())
        self._fingerprint = Fingerprint("model", "tokenizer", "shape", "float32", "none", profile.block_size, "v1")
        self._hasher_root = root_hash(self._fingerprint, "")
        self._requests: dict[Seq, SimRequest] = {}
        self._ready_at: dict[Seq, float] = {}
        self._lent: set[Seq] = set()
        self._take_role(role)

    # ---- what the cluster asks ----

    def record(self) -> WorkerRecord:
        """Return what this worker's heartbeat would say now."""
        now = self._clock.now
        if self.role is Role.PREFILL:
            running, waiting = self._prefill.num_running, self._prefill.num_waiting
            queued = self._prefill.num_queued_tokens
        else:
            running, waiting = self._decode.num_running, self._decode.num_waiting
            queued = self._decode.num_queued_tokens
        load = WorkerLoad(
            running=running,
            waiting=waiting,
            queued_tokens=queued,
            tokens_per_s=self._meter.prompt_tokens_per_s,
            tick_age_s=self._meter.tick_age_s(now),
            busy=self._meter.busy(now),
            itl_s=self._meter.itl_s,
            admission_wait_s=self._admission_wait_s(),
        )
        return WorkerRecord(
            worker_id=self.name,
            role=self.role,
            epoch=self.epoch,
            pid=1,
            address=self.name,
            state=self.state,
            device="simulated",
            fingerprint=self._fingerprint,
            model="simulated",
            max_model_len=self._profile.kv_blocks * self._profile.block_size,
            load=load,
            blocks=self.pool.counts(),
            slots=SlotCounts(0, 0),
            counters={},
        )

    def held_tokens(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens are cached here."""
        return self._new_table().cached_prefix(token_ids)

    @property
    def is_empty(self) -> bool:
        """Whether nothing here holds a block or waits."""
        return not self._requests

    def requests(self) -> list[SimRequest]:
        """Return the requests here."""
        return list(self._requests.values())

    def change(self, role: Role) -> None:
        """Take the other role; the worker must be empty. What is cached stays."""
        self.role = role
        self.epoch = Epoch(self.epoch + 1)
        self.state = WorkerState.READY
        self._take_role(role)

    # ---- decode ----

    def accept(self, request: SimRequest) -> int:
        """Own a sequence; return how many of its leading tokens are cached here."""
        request.sequence = self._new_sequence(request)
        self._decode.add(request.sequence)
        return request.sequence.table.cached_prefix(request.token_ids)

    def compute_here(self, request: SimRequest, *, gently: bool) -> None:
        """Read the prompt too."""
        assert request.sequence is not None
        self._decode.compute_here(request.sequence, gently=gently)
        self._ready_at[request.sequence] = self._clock.now
        self.wake()

    def expect(self, request: SimRequest) -> None:
        """A prefill worker reads the prompt."""
        assert request.sequence is not None
        self._decode.expect(request.sequence)

    def offered(self, request: SimRequest) -> None:
        """The prefill worker has begun."""
        if request.sequence in self._requests:
            self._decode.offered(request.sequence)
            self._ready_at[request.sequence] = self._clock.now
            self.wake()

    def is_pulling(self, request: SimRequest) -> bool:
        """Whether the sequence has its blocks here and waits for their bytes."""
        return request.sequence is not None and self._decode.stage(request.sequence) is Stage.PULLING

    def pulled(self, request: SimRequest, num_tokens: int) -> None:
        """The prompt's blocks are here."""
        assert request.sequence is not None
        self._decode.pulled(request.sequence, num_tokens)
        self.wake()

    def leave(self, request: SimRequest) -> None:
        """The sequence has ended, or moves."""
        sequence = request.sequence
        if sequence is not None and self._requests.pop(sequence, None) is not None:
            self._ready_at.pop(sequence, None)
            self._decode.retire(sequence)
            sequence.table.release()
            request.sequence = None

    # ---- prefill ----

    def read(self, request: SimRequest) -> None:
        """Queue a prompt."""
        request.reading = self._new_sequence(request)
        self._prefill.add(request.reading)
        self.wake()

    def release(self, request: SimRequest) -> None:
        """The decode worker has the blocks, or nobody wants them."""
        sequence = request.reading
        if sequence is not None and self._requests.pop(sequence, None) is not None:
            self._prefill.remove(sequence)
            sequence.table.release()
            request.reading = None
            self.wake()

    def has_begun(self, request: SimRequest) -> bool:
        """Whether the prompt has its blocks here."""
        return request.reading is not None and bool(request.reading.table.block_ids)

    # ---- steps ----

    def wake(self) -> None:
        """Take the next step, if none runs and there is one."""
        if self.is_stepping:
            return
        chunks = self._schedule()
        if not chunks:
            self._meter.idle()
            return
        self.is_stepping = True
        self._meter.begin(self._clock.now, sum(chunk.num_scheduled_tokens for chunk in chunks))
        self._clock.after(self._profile.step_s(chunks) * self._slow(self), lambda: self._stepped(chunks))

    def _schedule(self) -> Sequence[Chunk]:
        if self.role is Role.PREFILL:
            step = self._prefill.schedule()
            for sequence in step.admitted:
                self._told.begun(self._requests[sequence])
            return step.chunks
        decision = self._decode.schedule(self._clock.now)
        for slot in decision.pulls:
            self._ready_at.pop(slot.sequence, None)
            self._told.has_room(self._requests[slot.sequence])
        for slot in decision.started:
            self._ready_at.pop(slot.sequence, None)
        return decision.chunks

    def _stepped(self, chunks: Sequence[Chunk]) -> None:
        sizes = [chunk.num_scheduled_tokens for chunk in chunks]
        self._meter.end(self._clock.now, sum(size for size in sizes if size > 1), decodes=1 in sizes)
        for chunk in chunks:
            request, samples = self._requests.get(chunk.sequence), chunk.samples
            if request is None:  # left while the step ran
                continue
            if self.role is Role.PREFILL:
                self._prefill.computed(chunk)
                if samples:
                    self._told.read_to_end(request)
            else:
                self._decode.computed(chunk)
                if samples:
                    self._told.wrote(request)
        self.is_stepping = False  # only now: what the cluster was told may have asked for the next step
        self.wake()

    # ---- construction ----

    def _take_role(self, role: Role) -> None:
        profile = self._profile
        if role is Role.PREFILL:
            self._prefill = PrefillScheduler(
                self.pool, token_budget=profile.token_budget, max_num_seqs=profile.max_num_seqs
            )
        else:
            self._decode = DecodeScheduler(
                self.pool,
                max_num_seqs=profile.max_num_seqs,
                token_budget=profile.token_budget,
                local_chunk_tokens=profile.local_chunk_tokens,
            )

    def _new_sequence(self, request: SimRequest) -> Seq:
        sampling = SamplingParams(max_tokens=request.arrival.answer_tokens)
        name, num_prompt = RequestId(str(request.number)), request.arrival.prompt_tokens
        sequence = Seq(name, list(request.token_ids), num_prompt, sampling, self._new_table())
        self._requests[sequence] = request
        return sequence

    def _new_table(self) -> BlockTable:
        return BlockTable(self.pool, PrefixHasher(self._hasher_root, self._profile.block_size))

    def _admission_wait_s(self) -> float:
        if self.role is Role.PREFILL:
            return 0.0
        first = self._decode.first_without_room()
        return 0.0 if first is None else self._clock.now - self._ready_at.get(first, self._clock.now)


def slowness(worker: SimWorker, workers: Iterable[SimWorker], profile: CostProfile) -> float:
    """Return how many times longer a step of ``worker`` takes that begins beside the steps that run."""
    num_others = sum(one.is_stepping for one in workers if one is not worker)
    contention = profile.prefill_contention if worker.role is Role.PREFILL else profile.decode_contention
    per_core = (1 + num_others) / profile.shared_cores if profile.shared_cores else 1.0
    return max(1 + contention * num_others, per_core)

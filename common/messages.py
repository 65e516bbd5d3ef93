"""Every message that crosses a process, in the order of a request's life.

Encoded by :mod:`common.wire` as a msgpack map with a ``type`` field; an unknown type or field is an error. Limits in
time are remaining seconds, never a clock of another machine.

Session (gateway <-> decode, one bidirectional stream a pair):  Submit -> Accepted | Refused; Plan; Abort;
    Started, maybe PromptLogprobs, then Tokens for all its sequences once a step; Preempted, then from Plan on again.
Queue (gateway -> prefill, a Redis stream):  Prefill.
Control (prefill -> decode):  Offer.   Control (decode -> prefill):  Hello, Renew, Done, Cancel.
Control (gateway -> worker, for its operator):  Drain, TakeRole, Inspect.
Bulk (decode <- prefill, server stream):  Pull -> KvFrame ..., Handover, End.
    A frame carries its blocks' bytes, or says that they are ready to be read by id with the transport that Pull names.
Sharing (any worker -> any worker):  Borrow, then Pull -> KvFrame ..., End.   Gateway -> worker:  Keep, ResetCache.
"""

import enum

import msgspec

from common.errors import ErrorDetail
from common.ids import BlockId, Epoch, RequestId, TransferId, WorkerId
from common.logprobs import TokenLogprobs
from common.sampling import FinishReason, SamplingParams

PROTOCOL = 2
"""Version of everything in this file; part of the fingerprint."""

GRPC = "grpc"
"""The transport whose bytes are in the frames themselves."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """Base of every message; the tag is the class name."""


class Role(enum.StrEnum):
    """What a worker does at present."""

    PREFILL = "prefill"
    DECODE = "decode"


class WorkerState(enum.StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"  # registered, model not loaded yet
    READY = "ready"  # takes work
    DRAINING = "draining"  # finishes what it has, takes nothing new


class PlanKind(enum.StrEnum):
    """Who computes the prompt."""

    LOCAL = "local"  # the decode worker itself, in chunks
    REMOTE = "remote"  # a prefill worker, handed over by block id


class PeerPrefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who is said to hold the blocks of a prompt's first tokens. Advisory: the holder checks what it lends."""

    worker_id: WorkerId
    epoch: Epoch
    role: Role
    address: str
    num_tokens: int
    """Leading tokens whose blocks it holds."""


# ---- session: gateway -> decode ----------------------------------------------------------------


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One of the answers to a prompt that are to be written."""

    index: int
    """Its number among them; keys its random numbers."""
    output_ids: tuple[int, ...] = ()
    """Its tokens that the client already has, when it moved here from another worker."""


class Submit(Message, frozen=True):
    """Ask a decode worker to own a prompt's samples. It answers Accepted or Refused, and computes nothing before Plan.

    The prompt is computed once, whatever the number of samples.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    """The prompt."""
    sampling: SamplingParams
    samples: tuple[Sample, ...] = (Sample(0),)
    """The answers that are not complete yet, at least one."""
    cache_salt: str = ""
    """Blocks are shared only between equal salts."""
    is_replay: bool = False
    """Work on the prompt had begun elsewhere, so its cache hits are counted already."""

    @property
    def shared_ids(self) -> tuple[int, ...]:
        """What is computed once for all samples: the prompt, and the output so far when there is only one."""
        return (*self.token_ids, *self.samples[0].output_ids) if len(self.samples) == 1 else self.token_ids

    @property
    def next_indices(self) -> tuple[int, ...]:
        """The samples whose next token follows ``shared_ids``; of a beam search, the first speaks for all."""
        if self.sampling.beam is not None:
            return (self.samples[0].index,)
        alone = len(self.samples) == 1
        return tuple(sample.index for sample in self.samples if alone or not sample.output_ids)


class Plan(Message, frozen=True):
    """Say who computes what is missing. A later Plan replaces an earlier one; valid blocks are kept."""

    request_id: RequestId
    kind: PlanKind
    transfer_id: TransferId | None = None
    """The transfer to expect when ``kind`` is remote."""
    peer: PeerPrefix | None = None
    """From whom a prefix may be pulled when ``kind`` is local."""
    gently: bool = False
    """When ``kind`` is local: in so few tokens a step that answers beside it do not slow down."""


class Abort(Message, frozen=True):
    """The gateway no longer wants the samples; an unknown id is ignored."""

    request_id: RequestId
    reason: str = ""
    samples: tuple[int, ...] = ()
    """Indices of the samples that are meant; empty: all."""


SessionUp = Submit | Plan | Abort

# ---- session: decode -> gateway ----------------------------------------------------------------


class Accepted(Message, frozen=True):
    """The decode worker owns the sequence from here on and waits for a Plan."""

    request_id: RequestId
    cached_tokens: int
    """Leading tokens whose blocks this worker holds now; what a local plan would not compute."""


class Refused(Message, frozen=True):
    """The decode worker does not take the sequence; another may."""

    request_id: RequestId
    error: ErrorDetail


class Started(Message, frozen=True):
    """Work on the prompt has begun."""

    request_id: RequestId
    cached_tokens: int
    """Leading tokens found in the prefix cache of the worker that computes the prompt, and so not computed."""


class PromptLogprobs(Message, frozen=True):
    """How likely the prompt is, if that was asked for; sent once, before the first token of any sample."""

    request_id: RequestId
    logprobs: tuple[TokenLogprobs, ...]
    """For each token of the prompt but the first, which nothing precedes."""


class SequenceOutput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What one step brought one sample."""

    request_id: RequestId
    output_index: int
    """Index among the output tokens of the first of ``token_ids``; a receiver drops what it already has."""
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    error: ErrorDetail | None = None
    """Set when the worker gave the request up, with all its samples; nothing follows."""
    sample_index: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``token_ids``, if that was asked for."""


class Tokens(Message, frozen=True):
    """All that one step brought the sequences of this session."""

    outputs: tuple[SequenceOutput, ...]


class Preempted(Message, frozen=True):
    """The only sample of a request had to give its blocks back. It is computed again, here unless a Plan says where."""

    request_id: RequestId
    cached_tokens: int
    """As in Accepted."""


SessionDown = Accepted | Refused | Started | PromptLogprobs | Tokens | Preempted

# ---- queue: gateway -> prefill -----------------------------------------------------------------


class Prefill(Message, frozen=True):
    """A prompt for a prefill worker: compute it, sample the next token, hand it to the decode worker."""

    request_id: RequestId
    transfer_id: TransferId
    token_ids: tuple[int, ...]
    """What all samples have in common: the prompt, followed by the output so far when there is only one."""
    num_prompt_tokens: int
    sampling: SamplingParams
    decode_worker: WorkerId
    decode_epoch: Epoch
    decode_address: str
    remaining_s: float
    """Seconds left when the message was sent; work that is not begun by then is dropped."""
    cache_salt: str = ""
    peer: PeerPrefix | None = None
    """From whom a prefix may be pulled that the prefill worker lacks."""
    is_replay: bool = False
    """As in Submit."""
    sample_indices: tuple[int, ...] = (0,)
    """Samples whose next token follows ``token_ids``; none when each of them has further tokens."""


# ---- control -----------------------------------------------------------------------------------


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be equal for two workers to exchange KV blocks."""

    model: str
    """Digest of the model's configuration and weights."""
    tokenizer: str
    """Digest of the tokenizer's files."""
    kv_shape: str
    """Digest of the layers' (kv heads, K width, V width) in order."""
    kv_dtype: str
    quantization: str
    block_size: int
    layout: str
    protocol: int = PROTOCOL


class Hello(Message, frozen=True):
    """First message of a pair, from the worker that will pull."""

    worker_id: WorkerId
    epoch: Epoch
    fingerprint: Fingerprint


class TransportOffer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One way to read a worker's blocks beside gRPC, which there always is."""

    name: str
    detail: bytes
    """What a reader needs to begin; only the transport of that name understands it."""


class HelloReply(Message, frozen=True):
    """The puller compares it with its own fingerprint and refuses the pair on a difference."""

    worker_id: WorkerId
    epoch: Epoch
    fingerprint: Fingerprint
    transports: tuple[TransportOffer, ...] = ()


class Offer(Message, frozen=True):
    """A prefill worker has begun ``transfer_id`` and can be pulled from."""

    transfer_id: TransferId
    worker_id: WorkerId
    epoch: Epoch
    address: str
    generation: int
    """Echoed by Done, so that a late Done cannot release a newer lease."""
    cached_tokens: int
    """Leading tokens that the prefill worker found in its prefix cache."""
    decode_epoch: Epoch
    """The life of the decode worker that this is meant for."""


class OfferReply(Message, frozen=True):
    """Whether the decode worker still wants the transfer; if not, the prefill worker drops it."""

    accepted: bool
    reason: str = ""


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """Names one lease of a prefill worker."""

    transfer_id: TransferId
    generation: int


class Renew(Message, frozen=True):
    """Keep these leases alive; one message for all that a decode worker waits for."""

    epoch: Epoch
    transfer_ids: tuple[TransferId, ...]


class RenewReply(Message, frozen=True):
    """Ids that are gone; the puller stops waiting for them."""

    unknown: tuple[TransferId, ...]


class Done(Message, frozen=True):
    """These transfers were received and checked; release their blocks. Idempotent."""

    epoch: Epoch
    leases: tuple[Lease, ...]


class Cancel(Message, frozen=True):
    """Stop and release these transfers, whatever state they are in. Idempotent; unknown ids are ignored."""

    epoch: Epoch
    transfer_ids: tuple[TransferId, ...]
    reason: str = ""


class Ack(Message, frozen=True):
    """Empty answer."""


class Borrow(Message, frozen=True):
    """Ask another worker for the blocks of a prefix: it pins what it holds of it, under a lease, to be pulled."""

    epoch: Epoch
    transfer_id: TransferId
    """Made by the borrower."""
    chain: bytes
    """Hashes of the prefix's blocks from the first on, one after the other."""


class BorrowReply(Message, frozen=True):
    """What can be pulled; nothing is pinned when it is nothing."""

    num_blocks: int
    generation: int
    """Echoed by Done."""


class Keep(Message, frozen=True):
    """Never evict the blocks of these prefixes, and of no others."""

    epoch: Epoch
    chains: tuple[bytes, ...]
    """Each as in Borrow."""


class ResetCache(Message, frozen=True):
    """Forget all cached blocks; what sequences hold goes on."""

    epoch: Epoch


# ---- control: operator -> worker, by way of a gateway -------------------------------------------


class Drain(Message, frozen=True):
    """Take nothing new, let running work end or move, then exit."""

    epoch: Epoch


class TakeRole(Message, frozen=True):
    """Take nothing new, let running work end or move, then work in ``role`` under a new epoch."""

    epoch: Epoch
    role: Role
    drain_s: float
    """Seconds that running work gets."""
    fence: int
    """Number under which the sender may change roles; one below the highest seen is refused."""


class Inspect(Message, frozen=True):
    """Say what is held, and whether the books balance."""

    epoch: Epoch


class SequenceReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sequence on a worker."""

    request_id: RequestId
    stage: str
    num_tokens: int
    num_computed_tokens: int
    num_blocks: int


class LeaseReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One lease that a worker has granted."""

    transfer: str
    """The beginning of the transfer's id; the whole would be a key to its blocks."""
    num_blocks: int
    remaining_s: float


class KvReport(Message, frozen=True):
    """All that a worker holds."""

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    state: WorkerState
    blocks: "BlockCounts"
    integrity: str
    """What is wrong with the pool's books; empty when they balance."""
    sequences: tuple[SequenceReport, ...]
    leases: tuple[LeaseReport, ...]
    num_awaited: int
    """Transfers of other workers whose leases this one keeps alive."""
    quarantined: tuple[BlockId, ...]
    """Blocks that somebody may still write to."""


# ---- bulk: decode <- prefill -------------------------------------------------------------------


class Pull(Message, frozen=True):
    """Read a transfer's blocks as they are computed."""

    transfer_id: TransferId
    epoch: Epoch
    have_tokens: int
    """Leading tokens that the puller holds already; a whole number of blocks, or all of them."""
    transport: str = GRPC
    """How the puller gets the bytes: in the frames, or by a transport that the source has offered."""


class KvFrame(msgspec.Struct, frozen=True):
    """Some whole blocks of one transfer, in place at their source; a payload travels raw behind a msgpack header."""

    transfer_id: TransferId
    seq: int
    """0, 1, 2 ... within one Pull."""
    token_start: int
    """First token covered; a multiple of the block size."""
    token_end: int
    """One past the last token covered; inside the last block when the prompt ends there."""
    block_ids: tuple[BlockId, ...]
    """Source blocks, in order."""
    checksum: int
    """xxh3-64 of their bytes."""
    payload: bytes | memoryview | None
    """``len(block_ids) * block_bytes`` bytes; None: the puller reads them itself, by the blocks' ids."""


class SampledToken(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The next token of one sample."""

    sample_index: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Set if it was asked for."""
    is_complete: bool = False
    """It completes the sample's constraint."""


class Handover(Message, frozen=True):
    """The next tokens, sampled by the prefill worker; sent as soon as they are known, maybe before the last frames."""

    transfer_id: TransferId
    num_tokens: int
    """Tokens whose KV the transfer covers."""
    tokens: tuple[SampledToken, ...]
    """The token after them, of each sample that asked for it."""
    cached_tokens: int
    has_kv: bool = True
    """False when every one of ``tokens`` ends its answer, so that no KV is needed and none follows."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """As in PromptLogprobs."""


class End(Message, frozen=True):
    """The stream is complete; a stream without it is short."""

    transfer_id: TransferId
    num_frames: int


PullItem = KvFrame | Handover | End

# ---- registry ----------------------------------------------------------------------------------


class BlockCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of one pool by state; the four states sum to ``total``."""

    total: int
    free: int
    cached: int
    held: int
    quarantined: int


class SlotCounts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Token slots of held blocks; ``1 - used / allocated`` is the KV waste."""

    allocated: int
    used: int


class WorkerLoad(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A worker's load at its last heartbeat."""

    running: int
    """Sequences in the last step's batch or ready for the next."""
    waiting: int
    """Sequences accepted and not running."""
    queued_tokens: int
    """Prompt tokens accepted and not computed yet."""
    tokens_per_s: float
    """Measured prompt tokens a second while busy; 0 until measured."""
    tick_age_s: float
    """Seconds since the step loop should have turned, by the size of its step and the measured rate; 0 when idle."""
    pull_tokens_per_s: float = 0.0
    """Measured tokens a second of blocks pulled from other workers; 0 until measured."""
    busy: float = 0.0
    """Share of the last seconds in which a step ran."""
    itl_s: float = 0.0
    """Seconds between two tokens of a sequence, a mean of the last ones; 0 while nothing decodes."""
    admission_wait_s: float = 0.0
    """Seconds for which the sequence that has waited longest for room has waited."""


# ---- planner: gateway -> gateways, in Redis ----------------------------------------------------


class PlannerStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One decision of the planner: to do something, or to hold for another reason than before."""

    at_s: int
    """Unix time."""
    action: str
    reason: str
    ratio: str
    """Before it."""
    prefill: float
    """Smoothed pressure of the prefill pool; 1 is where the target is missed."""
    decode: float
    donor_after: float
    """Predicted pressure of the pool that gives a worker; 0 where none was considered."""
    local_prefill_tokens: int
    outcome: str
    """``advised``, ``begun``, ``done``, or why it failed; empty for a hold."""


class PlannerState(Message, frozen=True):
    """What the gateway that plans has decided, for all gateways to follow and to show."""

    leader: str
    mode: str
    home: str
    local_prefill_tokens: int
    steps: tuple[PlannerStep, ...]
    """The last ones, oldest first."""


QUEUE_RESETS = "queue_resets"
"""Counter of a prefill worker's record: how often its queue was gone, with all that it had not taken from it."""


class WorkerRecord(Message, frozen=True):
    """What the registry holds of a worker, refreshed every second."""

    worker_id: WorkerId
    role: Role
    epoch: Epoch
    pid: int
    address: str
    state: WorkerState
    device: str
    fingerprint: Fingerprint
    model: str
    """Name that clients use."""
    max_model_len: int
    load: WorkerLoad
    blocks: BlockCounts
    slots: SlotCounts
    counters: dict[str, int]
    """Monotonic counts since the worker's start, by metric name."""

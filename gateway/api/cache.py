"""``/v1/cache/``: how well the cluster's prefix cache works, which prefixes are shared, and who holds a prompt."""

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from common.errors import BatonError, InvalidRequest, NotFound
from common.ids import WorkerId
from common.messages import BlockCounts, ResetCache, Role, WorkerRecord
from common.redis_client import RedisUnavailable
from common.services import RESET_CACHE
from gateway.api import chat, completions
from gateway.api.body import read_json_body
from gateway.api.fields import decode
from gateway.http.salt import check_salt, salt_of
from gateway.parts import Parts, parts_of
from gateway.telemetry.cache_ledger import CacheCounts, WorkerCounts, total
from gateway.telemetry.prefix_ledger import SharedPrefix

WINDOWS: dict[str, float | None] = {"60s": 60.0, "5m": 300.0, "1h": 3600.0, "all": None}
DEFAULT_TOP, MAX_TOP = 20, 1000
CALL_TIMEOUT_S = 3.0


class Sources(msgspec.Struct, frozen=True):
    """Hit tokens by where their KV came from."""

    local: int
    peer: int
    decode: int


class Counts(msgspec.Struct, frozen=True):
    """Tokens of some workers."""

    queries_tokens: int
    hit_tokens: int
    hit_rate: float
    by_source: Sources


class WorkerStats(msgspec.Struct, frozen=True):
    """One worker's share."""

    worker: WorkerId
    role: Role
    queries_tokens: int
    hit_tokens: int
    hit_rate: float
    by_source: Sources
    evictions: int


class Blocks(msgspec.Struct, frozen=True):
    """KV blocks by state, and how many the index names."""

    total: int
    free: int
    cached: int
    held: int
    quarantined: int
    indexed: int | None
    """None when Redis cannot be reached."""


class CacheStats(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/cache/stats``."""

    window_s: float
    queries_tokens: int
    hit_tokens: int
    hit_rate: float
    by_source: Sources
    by_worker: list[WorkerStats]
    by_role: dict[str, Counts]
    blocks: Blocks
    evictions: int
    saved_prefill_seconds: float


class PrefixStats(msgspec.Struct, frozen=True):
    """One shared prefix."""

    hash: str
    tokens: int
    first_words: str
    requests: int
    hit_rate: float
    saved_tokens: int
    holders: list[WorkerId]
    last_used_s: float
    """Seconds ago."""


class PrefixList(msgspec.Struct, frozen=True):
    """The answer of ``GET /v1/cache/prefixes``."""

    prefixes: list[PrefixStats]


class LookupFields(msgspec.Struct, frozen=True):
    """The body of a lookup: one of the two."""

    messages: list[chat.Message] | None = None
    prompt: str | list[int] | None = None
    cache_salt: str | None = None


class Holder(msgspec.Struct, frozen=True):
    """One worker that holds the beginning of a prompt."""

    worker: WorkerId
    role: Role
    cached_tokens: int


class LookupReply(msgspec.Struct, frozen=True):
    """How much of a prompt is cached, and where."""

    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    workers: list[Holder]


class ResetReply(msgspec.Struct, frozen=True):
    """Which workers have forgotten their cache, and why others have not."""

    workers: list[WorkerId]
    failed: dict[WorkerId, str]


_LOOKUP = msgspec.json.Decoder(LookupFields)


async def stats(request: Request) -> Response:
    """Return hit rates in a window, for the cluster or one worker."""
    parts, now = parts_of(request), asyncio.get_running_loop().time()
    window_s = _window(request.query_params.get("window", "all"))
    workers = list(parts.services.cache.counts(now, window_s))
    records = [worker.record for worker in parts.services.cluster.view().workers]
    only = request.query_params.get("worker")
    if only is not None:
        workers = [worker for worker in workers if worker.worker_id == only]
        records = [record for record in records if record.worker_id == only]
        if not workers and not records:
            raise NotFound(f"there is no worker {only[:100]!r}", param="worker")
    counts = total(workers)
    return _json(
        CacheStats(
            window_s=round(parts.services.cache.covered_s(now, window_s), 3),
            queries_tokens=counts.queries,
            hit_tokens=counts.hits,
            hit_rate=counts.hit_rate,
            by_source=_sources(counts),
            by_worker=[_worker(worker) for worker in workers],
            by_role={role.value: _role(role, workers) for role in Role},
            blocks=await _blocks(parts, records),
            evictions=counts.evictions,
            saved_prefill_seconds=_saved_s(parts, counts),
        )
    )


async def prefixes(request: Request) -> Response:
    """Return the shared prefixes that have saved most tokens."""
    parts = parts_of(request)
    found = parts.services.prefixes.top(_top(request.query_params.get("top")))
    records = [worker.record for worker in parts.services.cluster.view().workers]
    lives = [(record.worker_id, record.epoch) for record in records]
    try:
        holders = await parts.services.locator.index.holders([prefix.block_hash for prefix in found], lives)
    except RedisUnavailable:
        holders = [[] for _ in found]
    now = asyncio.get_running_loop().time()
    return _json(PrefixList([_prefix(parts, *pair, now) for pair in zip(found, holders, strict=True)]))


async def lookup(request: Request) -> Response:
    """Return how much of a prompt is cached, and where."""
    parts = parts_of(request)
    fields = decode(await read_json_body(request, parts.config.max_body_bytes), _LOOKUP)
    check_salt(fields.cache_salt)
    token_ids = await _tokens(parts, fields)
    located = await parts.services.locator.locate(token_ids, salt_of(request, fields.cache_salt))
    roles = {worker.worker_id: worker.record.role for worker in parts.services.cluster.view().workers}
    holders = [
        Holder(worker_id, roles[worker_id], held)
        for worker_id, held in sorted(located.num_tokens.items(), key=lambda item: (-item[1], item[0]))
        if worker_id in roles
    ]
    cached = max((holder.cached_tokens for holder in holders), default=0)
    return _json(LookupReply(len(token_ids), cached, round(cached / max(1, len(token_ids)), 6), holders))


async def reset(request: Request) -> Response:
    """Let every worker forget its cached blocks."""
    parts = parts_of(request)
    records = [worker.record for worker in parts.services.cluster.view().workers]
    errors = await asyncio.gather(*(_reset(parts, record) for record in records))
    parts.services.prefixes.clear()
    failed = {record.worker_id: error for record, error in zip(records, errors, strict=True) if error is not None}
    return _json(ResetReply([r.worker_id for r in records if r.worker_id not in failed], failed))


async def _reset(parts: Parts, record: WorkerRecord) -> str | None:
    client = parts.services.cluster.client(record)
    try:
        await client.call(RESET_CACHE, ResetCache(record.epoch), CALL_TIMEOUT_S)
    except BatonError as error:
        return error.message
    finally:
        await client.close()
    return None


async def _tokens(parts: Parts, fields: LookupFields) -> list[int]:
    if (fields.messages is None) == (fields.prompt is None):
        raise InvalidRequest("exactly one of messages and prompt must be given", param="prompt")
    limit = parts.services.cluster.max_model_len()
    if fields.messages is not None:
        conversation = chat.conversation(fields.messages, parts.config)
        return await parts.tokenizer.encode_chat(conversation, limit)
    if isinstance(fields.prompt, str):
        return await parts.tokenizer.encode_prompt(fields.prompt, limit)
    assert fields.prompt is not None
    completions.check_tokens(fields.prompt, parts.tokenizer.vocab_size)
    return fields.prompt


def _window(text: str) -> float | None:
    if text not in WINDOWS:
        raise InvalidRequest(f"window must be one of {', '.join(WINDOWS)}", param="window")
    return WINDOWS[text]


def _top(text: str | None) -> int:
    if text is None:
        return DEFAULT_TOP
    if not text.isdecimal() or len(text) > 6 or not 1 <= int(text) <= MAX_TOP:
        raise InvalidRequest(f"top must be a number between 1 and {MAX_TOP}", param="top")
    return int(text)


def _saved_s(parts: Parts, counts: CacheCounts) -> float:
    """Return the time that computing the hits would have taken; unpriced ones go by the workers' mean rate."""
    loads = [worker.record.load for worker in parts.services.cluster.view().workers]
    rates = [load.tokens_per_s for load in loads if load.tokens_per_s]
    unpriced_s = counts.unpriced * len(rates) / sum(rates) if rates else 0.0
    return round(counts.saved_ms / 1000 + unpriced_s, 3)


def _sources(counts: CacheCounts) -> Sources:
    return Sources(counts.local, counts.peer, counts.decode)


def _role(role: Role, workers: Sequence[WorkerCounts]) -> Counts:
    counts = total(worker for worker in workers if worker.role is role)
    return Counts(counts.queries, counts.hits, counts.hit_rate, _sources(counts))


def _worker(worker: WorkerCounts) -> WorkerStats:
    counts = worker.counts
    return WorkerStats(
        worker.worker_id,
        worker.role,
        counts.queries,
        counts.hits,
        counts.hit_rate,
        _sources(counts),
        counts.evictions,
    )


async def _blocks(parts: Parts, records: Sequence[WorkerRecord]) -> Blocks:
    try:
        sizes = await parts.services.locator.index.sizes([(record.worker_id, record.epoch) for record in records])
    except RedisUnavailable:
        indexed = None
    else:
        indexed = sum(sizes)
    states = {name: sum(getattr(record.blocks, name) for record in records) for name in BlockCounts.__struct_fields__}
    return Blocks(**states, indexed=indexed)


def _prefix(parts: Parts, prefix: SharedPrefix, holders: list[WorkerId], now: float) -> PrefixStats:
    return PrefixStats(
        hash=prefix.block_hash.hex(),
        tokens=prefix.num_tokens,
        first_words=parts.tokenizer.first_words(prefix.head),
        requests=prefix.num_requests,
        hit_rate=prefix.hit_rate,
        saved_tokens=prefix.saved_tokens,
        holders=holders,
        last_used_s=round(now - prefix.used_at, 3),
    )


def _json(content: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")

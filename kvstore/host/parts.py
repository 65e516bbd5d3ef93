"""What a worker has whatever its role: the model, the blocks, and the ways to reach others."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from redis.asyncio import Redis

from common.ids import BlockHash, BlockId, Epoch, WorkerId
from common.messages import Fingerprint
from common.model.load import load_model
from common.model.runner import ModelRunner
from common.model.spec import ModelSpec
from kvstore.block_pool import BlockPool
from kvstore.block_table import BlockTable
from kvstore.fingerprint import fingerprint
from kvstore.host.compute_thread import ComputeThread
from kvstore.host.config import WorkerConfig
from kvstore.host.flight import StepRunner
from kvstore.host.grammars import Grammars, grammars_of
from kvstore.host.meter import StepMeter
from kvstore.host.metrics import HostMetrics
from kvstore.host.stepper import Stepper
from kvstore.layout import KvLayout
from kvstore.lender import Lender
from kvstore.peers import PeerSet
from kvstore.prefix_fetcher import PrefixFetcher
from kvstore.prefix_hash import PrefixHasher, root_hash
from kvstore.retention import LeastRecentlyUsed
from kvstore.storage import KvStorage
from kvstore.transfer_client import TransferClient
from kvstore.transfer_server import TransferServer
from kvstore.transports.lending import Lending
from kvstore.transports.transports import Transports

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The model on its device, with the KV pool that it writes to."""

    spec: ModelSpec
    """``max_model_len`` is what the model, the pool and the configuration allow together."""
    runner: StepRunner
    storage: KvStorage
    transports: Transports
    """How others read this worker's blocks, and it theirs."""
    pool: BlockPool
    fingerprint: Fingerprint
    grammars: Grammars


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything an engine works with, for one life of the worker. Owned by that life."""

    config: WorkerConfig
    worker_id: WorkerId
    epoch: Epoch
    address: str
    model: ModelParts
    metrics: HostMetrics
    compute: ComputeThread
    redis: Redis
    transfers: TransferServer
    puller: TransferClient
    peers: PeerSet
    lender: Lender
    fetcher: PrefixFetcher
    prompt_tokens_per_s: float
    """Rate at which the life before computed prompts; 0: not measured."""

    def new_stepper(self) -> Stepper:
        """Return a step loop's hold on the compute thread."""
        meter = StepMeter(self.prompt_tokens_per_s)
        return Stepper(
            self.compute,
            self.model.runner,
            self.config.block_size,
            meter,
            self.metrics.stepped,
            reads_late=self.model.spec.device.type == "cuda",
        )

    def holders(self, tables: Iterable[BlockTable]) -> list[Sequence[BlockId]]:
        """Return every holder of references into the pool: an engine's ``tables``, loans, and fetches that run."""
        return [*(table.block_ids for table in tables), *self.lender.holders(), *self.fetcher.holders()]

    def new_table(self, cache_salt: str) -> BlockTable:
        """Return an empty block table whose blocks are shared within ``cache_salt`` only."""
        hasher = PrefixHasher(_root(self.model.fingerprint, cache_salt), self.config.block_size)
        return BlockTable(self.model.pool, hasher)


@lru_cache(maxsize=1024)
def _root(worker: Fingerprint, cache_salt: str) -> BlockHash:
    return root_hash(worker, cache_salt)


def load_model_parts(config: WorkerConfig) -> ModelParts:
    """Load the model and make its pool; runs on the compute thread. Raises UnsupportedModel or ConfigError."""
    torch.set_num_threads(config.threads or torch.get_num_threads())
    log.info("loading %s", config.model)
    loaded = load_model(
        config.model, dtype=config.dtype, device=config.device, max_model_len=config.max_model_len or None
    )
    spec = loaded.spec
    layout = KvLayout(spec.layers, config.block_size, spec.dtype)
    num_blocks = config.num_blocks(layout.block_bytes)
    lending = Lending.prepare(
        config.transport, spec.device, num_blocks, layout.block_bytes, is_encrypted=bool(config.tls_cert)
    )
    storage = KvStorage(layout, num_blocks, spec.device, memory=lending.pool_memory)
    runner = ModelRunner(loaded, storage.layer_views(), config.block_size)
    runner.warm_up()
    limit = min(spec.max_model_len, num_blocks * config.block_size)
    log.info("%s: %d blocks of %d bytes, up to %d tokens a sequence", spec.name, num_blocks, layout.block_bytes, limit)
    return ModelParts(
        replace(spec, max_model_len=limit),
        runner,
        storage,
        lending.open_transports(storage),
        BlockPool(num_blocks, config.block_size, LeastRecentlyUsed(int(num_blocks * config.tenant_cache_share))),
        fingerprint(spec, layout),
        grammars_of(config.model, spec),
    )

"""Options of ``baton up``; every field is a flag and a ``BATON_…`` variable."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.sizes import parse_size
from compose.smollm2 import NAME
from kvstore.transports.choices import TransportChoice


@dataclass(frozen=True, slots=True)
class UpConfig:
    """Start a cluster on this machine: a gateway, prefill workers, decode workers and, if none is given, Redis."""

    model: str = NAME
    """Model to serve: the name of one that Baton prepares, a folder, or OWNER/NAME on the model hub."""

    prefill: int = 1
    """Prefill workers to start; with 0 the decode workers read the prompts too."""

    decode: int = 1
    """Decode workers to start, at least one."""

    host: str = "127.0.0.1"
    """Address that the HTTP server listens on; workers always stay on the loopback interface."""

    port: int = 8000
    """Port that the HTTP server listens on; 0 takes a free one."""

    redis: str = ""
    """URL of a Redis server, version 7.2 or newer; empty: start an embedded one."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV; auto: the model's own on CUDA, float32 on a CPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on; auto: CUDA when there is one."""

    block_size: int = 16
    """Tokens in a KV block."""

    kv_blocks: int = 0
    """KV blocks in each worker's pool; 0: as many as --kv-memory holds."""

    kv_memory: str = "2GiB"
    """Memory of each worker's KV pool, used when --kv-blocks is 0."""

    max_model_len: int = 0
    """Tokens of prompt and answer together at most; 0: what the model and the pool allow."""

    threads: int = 0
    """Compute threads of each worker; 0: the machine's cores divided among the workers."""

    local_prefill_tokens: int = 64
    """Prompts with at most this many tokens that are not cached are prefilled where they are decoded."""

    planner: Literal["off", "advise", "auto"] = "off"
    """Whether the ratio of prefill to decode workers follows the load: off; advise: decide and say so; auto: decide and
    do it."""

    planner_ttft_s: float = 2.0
    """Seconds to a first token that the planner aims for."""

    planner_itl_s: float = 0.15
    """Seconds between two tokens of an answer that the planner aims for."""

    pin_prefix: Path | None = None
    """File of prefixes to warm and keep cached, one JSON object a line: {"name": ..., "system": ...} for chats, or
    {"name": ..., "prompt": ...}."""

    transport: TransportChoice = "auto"
    """How workers read each other's blocks: grpc; shm: shared memory; nixl: needs baton[nixl]; auto: shm between CPUs,
    nixl between GPUs. Where that cannot be, the reason is logged and gRPC used."""

    tenant_cache_share: float = 0.5
    """Share of a worker's KV blocks that the cache of one tenant (cache salt) may keep when others need room."""

    log_dir: Path | None = None
    """Folder for the log files; the default is one for each port in the user's state folder."""

    def __post_init__(self) -> None:
        if self.prefill < 0:
            raise ConfigError(f"--prefill must be 0 or more, not {self.prefill}")
        if self.decode < 1:
            raise ConfigError(f"--decode must be 1 or more, not {self.decode}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if not 1 <= self.block_size <= 256:
            raise ConfigError(f"--block-size must be between 1 and 256, not {self.block_size}")
        for name in ("kv_blocks", "max_model_len", "threads", "local_prefill_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(self, name)}")
        for name in ("planner_ttft_s", "planner_itl_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name)}")
        if not 0 < self.tenant_cache_share <= 1:
            raise ConfigError(f"--tenant-cache-share must be above 0 and at most 1, not {self.tenant_cache_share}")
        parse_size(self.kv_memory, flag="--kv-memory")

"""Options of a worker process; every field is a flag and a ``BATON_…`` variable."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.addresses import is_loopback
from common.errors import ConfigError
from common.logs import LogFormat
from common.messages import Role
from common.sizes import parse_size
from common.tls import check_tls
from kvstore.transports.choices import TransportChoice


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What one worker is told at its start."""

    model: str
    """Directory or hub name of the model."""

    served_model_name: str = ""
    """Name that clients use; empty: the last part of --model."""

    worker_id: str = ""
    """Stable name in the cluster; empty: the role, the host's name and the process id."""

    host: str = "127.0.0.1"
    """Address to listen on, and to give to other processes unless --advertise does."""

    port: int = 0
    """Port to listen on; 0 takes a free one."""

    advertise: str = ""
    """HOST:PORT that other processes connect to, where a proxy or a port mapping stands between; empty: what it listens
    on, or where that is every interface (0.0.0.0) the one from which Redis is reached."""

    metrics_port: int | None = None
    """Port on --host for /metrics, /health and /ready, without a key; 0 takes a free one; left out: there is none."""

    redis: str = "redis://127.0.0.1:6379"
    """URL of the Redis server."""

    cluster_token: str = ""
    """Secret that every call between processes carries."""

    tls_cert: str = ""
    """PEM file with this process's certificate, for mutual TLS between processes; with --tls-key and --tls-ca."""

    tls_key: str = ""
    """PEM file with the certificate's private key."""

    tls_ca: str = ""
    """PEM file with the authority that signs every process's certificate."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and KV; auto: the model's own on CUDA, float32 on a CPU."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to run on; auto: CUDA when there is one."""

    block_size: int = 16
    """Tokens in a KV block."""

    kv_blocks: int = 0
    """KV blocks in the pool; 0: as many as --kv-memory holds."""

    kv_memory: str = "2GiB"
    """Memory of the KV pool, used when --kv-blocks is 0."""

    transport: TransportChoice = "auto"
    """How blocks of other workers are read: grpc; shm: shared memory, on one machine; nixl: needs baton[nixl]; auto:
    shm between CPUs, nixl between GPUs. Where that cannot be, the reason is logged and gRPC used."""

    tenant_cache_share: float = 0.5
    """Share of the KV blocks that the cache of one tenant (cache salt) may keep when others need room."""

    max_model_len: int = 0
    """Tokens of prompt and answer together at most; 0: what the model and the pool allow."""

    threads: int = 0
    """Compute threads; 0: all cores."""

    prefill_nice: int = 5
    """How far the compute threads step back for everything else on the machine while the worker prefills on a CPU:
    added to their nice value; 0: not at all. Linux only."""

    max_num_seqs: int = 64
    """Sequences that run at a time."""

    max_waiting: int = 256
    """Sequences accepted beyond those that run; more are refused."""

    token_budget: int = 512
    """Prompt tokens that one step computes at most."""

    local_chunk_tokens: int = 64
    """Prompt tokens that one step computes beside decoding sequences at most."""

    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Launch a decode step while the one before it still runs, so that a GPU does not wait for the host; auto: on a GPU
    only."""

    preemption: Literal["auto", "recompute", "swap"] = "auto"
    """What happens to a sequence that has to make room while it decodes: it is computed again later, or its KV goes to
    host memory and back; auto: what is predicted to be sooner, by measured rates."""

    swap_memory: str = "1GiB"
    """Host memory for the KV of such sequences; 0: none."""

    priority_ageing_s: float = 5.0
    """Seconds of waiting for room that count as one level of priority."""

    lease_s: float = 30.0
    """Seconds that a finished prefill keeps its blocks for a decode worker that does not renew."""

    drain_seconds: float = 30.0
    """Seconds that running work may take after SIGTERM."""

    role_dir: Path | None = None
    """Folder that remembers, under the worker's name, the role that it was told to take last: it starts again in that
    one; none: it starts in the role of its command."""

    log_level: str = "INFO"
    """Lowest level that is logged."""

    log_format: LogFormat = "text"
    """How log lines are written: text, or json, one object a line."""

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= 256:
            raise ConfigError(f"--block-size must be between 1 and 256, not {self.block_size}")
        for flag in ("max_num_seqs", "max_waiting", "token_budget", "local_chunk_tokens"):
            if getattr(self, flag) < 1:
                raise ConfigError(f"--{flag.replace('_', '-')} must be at least 1, not {getattr(self, flag)}")
        for flag in ("kv_blocks", "max_model_len", "threads"):
            if getattr(self, flag) < 0:
                raise ConfigError(f"--{flag.replace('_', '-')} must not be negative, not {getattr(self, flag)}")
        if not 0 <= self.prefill_nice <= 19:
            raise ConfigError(f"--prefill-nice must be between 0 and 19, not {self.prefill_nice}")
        if not 0 < self.tenant_cache_share <= 1:
            raise ConfigError(f"--tenant-cache-share must be above 0 and at most 1, not {self.tenant_cache_share}")
        for flag in ("lease_s", "drain_seconds", "priority_ageing_s"):
            if not getattr(self, flag) > 0:
                raise ConfigError(f"--{flag.replace('_', '-')} must be above 0, not {getattr(self, flag)}")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ConfigError(f"--metrics-port must be between 0 and 65535, not {self.metrics_port}")
        if self.advertise and not self.advertise.rpartition(":")[2].isdecimal():
            raise ConfigError(f"--advertise must be HOST:PORT, not {self.advertise}")
        check_tls(self.tls_cert, self.tls_key, self.tls_ca)
        if not self.cluster_token and not is_loopback(self.host):
            raise ConfigError(f"--host {self.host} can be reached by others, so BATON_CLUSTER_TOKEN must be set")
        parse_size(self.kv_memory, flag="--kv-memory")
        parse_size(self.swap_memory, flag="--swap-memory")

    def name_for(self, role: Role) -> str:
        """Return the worker's id."""
        return self.worker_id or f"{role}-{os.uname().nodename}-{os.getpid()}"

    def compute_nice(self, role: Role, device_type: str) -> int:
        """Return what is added to the nice value of the compute threads in ``role``."""
        return self.prefill_nice if role is Role.PREFILL and device_type == "cpu" else 0

    def is_async_on(self, device_type: str) -> bool:
        """Whether decode steps are launched ahead on a device of that type."""
        return self.async_scheduling == "on" or (self.async_scheduling == "auto" and device_type == "cuda")

    def num_blocks(self, block_bytes: int) -> int:
        """Return the size of the pool in blocks; raises ConfigError when not even one fits."""
        num_blocks = self.kv_blocks or parse_size(self.kv_memory, flag="--kv-memory") // block_bytes
        if num_blocks < 1:
            raise ConfigError(f"--kv-memory {self.kv_memory} does not hold one KV block of {block_bytes} bytes")
        return num_blocks

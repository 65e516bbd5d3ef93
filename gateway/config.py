"""Options of a gateway process; every field is a flag and a ``BATON_…`` variable."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.logs import LogFormat
from common.tls import check_tls
from gateway.bounds import Bounds


@dataclass(frozen=True, slots=True)
class GatewayConfig(Bounds):
    """What one gateway is told at its start."""

    model: str
    """Directory or hub name of the model; only its tokenizer, chat template and configuration are read."""

    served_model_name: str = ""
    """Name that clients use; empty: the last part of --model."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8000
    """Port to listen on; 0 takes a free one."""

    port_file: Path | None = None
    """File that the port is written to once it is bound."""

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

    api_key: tuple[str, ...] = ()
    """Key that clients must send as a bearer token; may be given several times; none: any client is served."""

    admin_key: str = ""
    """Key for draining workers and looking into them; empty: only a gateway on loopback without API keys does that."""

    share_prefixes: bool = False
    """Whether clients with different API keys share cached prefixes; a client can then time what others have asked."""

    prefill_expected: bool = False
    """Whether /ready waits for a prefill worker too."""

    pin_prefix: Path | None = None
    """File of prefixes to warm and keep cached, one JSON object a line: {"name": ..., "system": ...} for chats, or
    {"name": ..., "prompt": ...}."""

    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral", "xml"] = "auto"
    """How the model writes calls of tools; auto: as its chat template says."""

    reasoning_parser: Literal["auto", "none", "think"] = "auto"
    """How the model marks its reasoning; auto: <think> if its chat template has that."""

    trust_request_template: bool = False
    """Whether a request may bring its own chat_template. A template can use much time and memory."""

    local_prefill_tokens: int = 64
    """Prompts with at most this many tokens that are not cached are prefilled where they are decoded."""

    max_prefill_wait_s: float = 30.0
    """A prompt whose wait for the prefill pool is estimated longer than this is prefilled where it is decoded, unless
    that takes longer; beside answers in few tokens a step, so that these do not slow down."""

    ttft_target: float = 30.0
    """Seconds to a first token that the waiting prompts may already take when one more is let in; beyond that requests
    are refused with 429; 0: no limit."""

    planner: Literal["off", "advise", "auto"] = "off"
    """Whether the ratio of prefill to decode workers follows the load: off; advise: decide and say so; auto: decide and
    do it. One gateway of a cluster plans at a time."""

    planner_ttft_s: float = 2.0
    """Seconds to a first token that the planner aims for."""

    planner_itl_s: float = 0.15
    """Seconds between two tokens of an answer that the planner aims for."""

    planner_drain_s: float = 10.0
    """Seconds that running work of a worker gets, when it takes the other role, before it moves to others."""

    max_requests: int = 1024
    """Answers in flight at most; more are refused with 429."""

    request_timeout_s: float = 600.0
    """Seconds from a request's arrival to the end of its answer at most."""

    accept_timeout_s: float = 5.0
    """Seconds that a decode worker may take to accept a sequence before the next one is asked."""

    max_migrations: int = 3
    """Times that one answer may move to another decode worker."""

    worker_wait_s: float = 5.0
    """Seconds that a request waits for a decode worker when none is ready, before it is refused."""

    reroute_wait_s: float = 60.0
    """Seconds that an answer which lost its decode worker waits for another one to appear."""

    max_tick_age_s: float = 10.0
    """A worker whose step takes so many seconds longer than one of its size may counts as stuck."""

    headers_after_s: float = 10.0
    """A streamed answer's headers are sent with its first token, or after this long."""

    keep_alive_s: float = 10.0
    """Seconds between two comments on a stream that has nothing to say."""

    drain_seconds: float = 30.0
    """Seconds that running requests may take after SIGTERM."""

    log_level: str = "INFO"
    """Lowest level that is logged."""

    log_format: LogFormat = "text"
    """How log lines are written: text, or json, one object a line."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("--model must name a directory or a model")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}")
        if self.max_requests < 1:
            raise ConfigError(f"--max-requests must be at least 1, not {self.max_requests}")
        self.check()
        for field in (
            "local_prefill_tokens",
            "max_migrations",
            "ttft_target",
            "worker_wait_s",
            "reroute_wait_s",
            "drain_seconds",
            "max_prefill_wait_s",
            "planner_drain_s",
        ):
            if getattr(self, field) < 0:
                raise ConfigError(f"--{field.replace('_', '-')} must not be negative, not {getattr(self, field)}")
        for field in (
            "planner_ttft_s",
            "planner_itl_s",
            "request_timeout_s",
            "accept_timeout_s",
            "max_tick_age_s",
            "headers_after_s",
            "keep_alive_s",
        ):
            if not getattr(self, field) > 0:
                raise ConfigError(f"--{field.replace('_', '-')} must be above 0, not {getattr(self, field)}")
        check_tls(self.tls_cert, self.tls_key, self.tls_ca)
        if any(not key for key in self.api_key):
            raise ConfigError("--api-key must not be empty")
        if self.admin_key and self.admin_key in self.api_key:
            raise ConfigError("--admin-key must not be one of the API keys")

    @property
    def model_name(self) -> str:
        """Name of the model as clients and workers know it."""
        return self.served_model_name or self.model.rstrip("/").rsplit("/", 1)[-1]

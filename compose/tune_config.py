"""Options of ``baton tune``; every field is a flag and a ``BATON_…`` variable."""

from dataclasses import dataclass
from pathlib import Path

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TuneConfig:
    """Simulate every ratio of prefill to decode workers under a load, and say which one to take."""

    workers: int = 4
    """Workers in all, of both kinds."""

    trace: Path | None = None
    """File of requests to serve, in the Mooncake (JSONL), BurstGPT or Azure (CSV) form; none: a load from --isl, --osl
    and --rate."""

    isl: int = 1000
    """Tokens of each prompt, without a trace."""

    osl: int = 200
    """Tokens of each answer, without a trace."""

    rate: float = 0.0
    """Requests a second; 0: 1, or a trace's own times."""

    seconds: float = 120.0
    """Length of the load, without a trace."""

    requests: int = 500
    """Requests of a trace that are simulated, from its beginning."""

    ttft: str = "2s"
    """Target for the first token, such as 2s or 500ms."""

    itl: str = "150ms"
    """Target for the mean time between two tokens of an answer."""

    profile: Path | None = None
    """File with the workers' speed; none: it is measured on the running cluster at --url."""

    save_profile: Path | None = None
    """File to write the measured speed to."""

    shared_cores: int = 0
    """Cores that all workers share, one thread each; 0: each worker has a device, or cores, of its own."""

    local_prefill_tokens: int = 64
    """Prompts with at most this many tokens that are not cached are prefilled where they are decoded."""

    plot: Path | None = None
    """PNG file to draw the outcomes into; needs matplotlib, which comes with the extra "plot"."""

    url: str = "http://127.0.0.1:8000"
    """Address of a gateway to measure at."""

    api_key: str = ""
    """Key to send, where the gateway asks for one; of several the first."""

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ConfigError(f"--workers must be at least 2, one of each kind, not {self.workers}")
        for name in ("isl", "osl", "requests"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} must be at least 1, not {getattr(self, name)}")
        for name in ("rate", "shared_cores", "local_prefill_tokens"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(self, name)}")
        if not self.seconds > 0:
            raise ConfigError(f"--seconds must be above 0, not {self.seconds}")

"""Options of ``baton bench serve``; the names are those of the benchmark tools that people know."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import ConfigError

GOALS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class BenchServeConfig:
    """Load a running server from outside, as its users would, and measure what they would see."""

    url: str = "http://127.0.0.1:8000"
    """Address of the server."""

    api_key: str = ""
    """Key to send, where the server asks for one; of several the first."""

    model: str = ""
    """Model to name in requests; empty: the first one that the server lists."""

    endpoint: Literal["completions", "chat"] = "completions"
    """Which API: completions send token ids, so prompts have exactly the length that is asked for."""

    dataset: Literal["random", "prefix", "trace"] = "random"
    """Prompts: random ones; random ones behind a few shared prefixes; or the lengths, times and sharing of a trace."""

    trace: Path | None = None
    """File for --dataset trace: Mooncake JSONL, or CSV in the BurstGPT or Azure form."""

    num_prompts: int = 100
    """Requests to send; of a trace at most so many."""

    input_len: int = 256
    """Prompt tokens; with --dataset prefix, those after the prefix."""

    output_len: int = 64
    """Tokens of each answer; the end-of-sequence token is ignored, so that answers have this length."""

    range_ratio: float = 0.0
    """Lengths are drawn between (1 - this) and (1 + this) times what is asked for."""

    num_prefixes: int = 4
    """Shared prefixes of --dataset prefix."""

    prefix_len: int = 512
    """Their length in tokens."""

    vocab_size: int = 8192
    """Token ids of prompts are drawn below this."""

    request_rate: float = float("inf")
    """Requests a second, sent whether or not answers have come; inf: all at once. A trace keeps its own times, unless
    this is given, which stretches or squeezes it."""

    burstiness: float = 1.0
    """Shape of the gaps between requests: 1 is a Poisson process, less comes in bursts, more is more even."""

    max_concurrency: int = 0
    """Requests in flight at most; what is due later waits, and its wait is not in its latency; 0: no limit."""

    num_warmups: int = 4
    """Requests that are sent first, one after the other, and not counted."""

    temperature: float = 0.0
    """Sampling temperature."""

    seed: int = 0
    """Of prompts, lengths and gaps; the same seed sends the same requests at the same times."""

    goodput: tuple[str, ...] = ()
    """Goal such as ttft:500, in milliseconds (ttft, tpot, itl, e2el); may be given several times. Requests that meet
    all are counted."""

    percentiles: tuple[float, ...] = (50.0, 90.0, 95.0, 99.0)
    """Percentiles of each latency."""

    timeout_s: float = 600.0
    """Seconds that one request may take."""

    json: bool = False
    """Print the result as JSON instead of a table."""

    save: Path | None = None
    """File to write the JSON to."""

    detailed: bool = False
    """Whether the JSON lists every request too."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "num_prefixes", "prefix_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(self, name)}")
        for name in ("request_rate", "burstiness", "timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name)}")
        for name in ("max_concurrency", "num_warmups", "temperature"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} must not be negative, not {getattr(self, name)}")
        if not 0 <= self.range_ratio < 1:
            raise ConfigError(f"--range-ratio must be at least 0 and below 1, not {self.range_ratio}")
        if self.vocab_size < 256:
            raise ConfigError(f"--vocab-size must be at least 256, not {self.vocab_size}")
        if any(not 0 < one <= 100 for one in self.percentiles):
            raise ConfigError("--percentiles must be above 0 and at most 100")
        if (self.dataset == "trace") != (self.trace is not None):
            raise ConfigError("--trace FILE and --dataset trace go together")
        parse_goals(self.goodput)


def parse_goals(texts: tuple[str, ...]) -> dict[str, float]:
    """Return the goals in milliseconds by metric; raises ConfigError."""
    goals = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            goals[name] = float(value)
        except ValueError:
            goals[name] = -1.0
        if name not in GOALS or not goals[name] > 0:
            raise ConfigError(f"--goodput must be like ttft:500, with one of {', '.join(GOALS)}, not {text!r}")
    return goals

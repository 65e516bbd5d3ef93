"""``baton tune``: try every ratio of prefill to decode workers on a simulated cluster, and say which one to take."""

from collections.abc import Sequence

import msgspec
from rich.console import Console

from common.errors import ConfigError
from compose.console import note, result
from compose.tune.calibrate import calibrate
from compose.tune.cluster import SimCluster
from compose.tune.outcome import Outcome, outcome
from compose.tune.profile import CostProfile, read_profile, write_profile
from compose.tune.report import outcome_table, plot, recommendation
from compose.tune.trace import Arrival, poisson, read_trace, scaled
from compose.tune_config import TuneConfig
from gateway.planner.pressure import Targets
from gateway.planner.ratio import Ratio

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0}


async def tune(config: TuneConfig) -> None:
    """Print the table and the recommendation; raises ConfigError or Unavailable."""
    targets, arrivals = _targets(config), _arrivals(config)
    profile = read_profile(config.profile) if config.profile else await calibrate(config.url, config.api_key)
    if config.save_profile is not None:
        write_profile(profile, config.save_profile)
    profile = msgspec.structs.replace(profile, shared_cores=config.shared_cores or profile.shared_cores)
    note(f"simulating {len(arrivals)} requests on {config.workers} workers, ratio by ratio")
    outcomes = try_ratios(profile, arrivals, targets, config.workers, config.local_prefill_tokens)
    Console().print(outcome_table(outcomes, targets))
    result(recommendation(outcomes, targets))
    if config.plot is not None:
        plot(outcomes, targets, config.plot)


def try_ratios(
    profile: CostProfile, arrivals: Sequence[Arrival], targets: Targets, workers: int, local_prefill_tokens: int
) -> list[Outcome]:
    """Return the outcome of each ratio of ``workers`` workers."""
    room = profile.kv_blocks * profile.block_size
    fitting = [one for one in arrivals if one.prompt_tokens + one.answer_tokens <= room]
    if not fitting:
        raise ConfigError(f"no request fits the {room} tokens of a worker's KV blocks")
    if len(fitting) < len(arrivals):
        note(f"{len(arrivals) - len(fitting)} requests are longer than the {room} tokens of a worker, and left out")
    seconds = max(1.0, fitting[-1].at_s)
    found = []
    for prefill in range(1, workers):
        ratio = Ratio(prefill, workers - prefill)
        run = SimCluster(profile, ratio, targets, local_prefill_tokens=local_prefill_tokens).run(fitting)
        found.append(outcome(run, ratio, targets, seconds))
    return found


def _targets(config: TuneConfig) -> Targets:
    """Return what a good answer is; raises ConfigError."""
    return Targets(parse_seconds(config.ttft, "--ttft"), parse_seconds(config.itl, "--itl"))


def _arrivals(config: TuneConfig) -> list[Arrival]:
    """Return the load; raises ConfigError."""
    if config.trace is None:
        return poisson(isl=config.isl, osl=config.osl, rate=config.rate or 1.0, seconds=config.seconds)
    found = read_trace(config.trace, config.requests)
    return scaled(found, config.rate) if config.rate else found


def parse_seconds(text: str, flag: str) -> float:
    """Return the seconds that ``text``, such as 150ms or 2s, names; raises ConfigError."""
    number = text.strip().rstrip("ms")
    unit = text.strip()[len(number) :] or "s"
    try:
        seconds = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        seconds = 0.0
    if not seconds > 0:
        raise ConfigError(f"{flag} must be a time such as 150ms or 2s, not {text}")
    return seconds

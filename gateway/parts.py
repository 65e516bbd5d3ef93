"""What the endpoints of one gateway share."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.dashboard.sampler import Sampler
from gateway.flow import FlowServices
from gateway.generation import Running
from gateway.grammar_checker import GrammarChecker
from gateway.keys import Keys
from gateway.message_forms import MessageForms
from gateway.metrics import Metrics
from gateway.planner.changer import RatioChanger
from gateway.planner.runner import PlannerRunner
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Parts:
    """Made once at the start of a gateway."""

    config: GatewayConfig
    keys: Keys
    tokenizer: Tokenizer
    message_forms: MessageForms
    """Of the model's own chat template."""
    grammars: GrammarChecker
    services: FlowServices
    metrics: Metrics
    registries: tuple[CollectorRegistry, ...]
    """All that /metrics shows."""
    admission: Admission
    running: Running
    sampler: Sampler
    changer: RatioChanger
    planner: PlannerRunner
    started_at: int
    """Unix time in seconds."""


def parts_of(request: Request) -> Parts:
    """Return the parts of the gateway that serves ``request``."""
    parts: Parts = request.app.state.parts
    return parts


def baton_version() -> str:
    """Return the version of this program."""
    try:
        return version("baton")
    except PackageNotFoundError:  # run from its source, not installed
        return "0+unknown"

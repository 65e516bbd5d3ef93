"""What the endpoints of one gateway share."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry
from starlette.requests import Request

from gateway.admission import Admission
from gateway.config import GatewayConfig
from gateway.dashboard.sampler import Sampler
from gateway.http.keys import Keys
from gateway.planner.changer import RatioChanger
from gateway.planner.runner import PlannerRunner
from gateway.request.flow import FlowServices
from gateway.request.generation import Running
from gateway.telemetry.metrics import Metrics
from gateway.text.grammar_checker import GrammarChecker
from gateway.text.message_forms import MessageForms
from gateway.text.tokenizer import Tokenizer


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

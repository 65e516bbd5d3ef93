"""A worker whose steps take what a profile says: a real worker, a tiny model, and a device that is only busy in time.

    python -P -m benchmarks.ratio.paced ROLE PROFILE.json PACE.json [options of a worker]

Each step is computed by the model, and then the compute thread sleeps until the step has taken as long as
:mod:`compose.tune.profile` says. So the speed of a worker does not depend on how many share the machine's cores, as
long as these are not all in use. Everything else is what `python -m prefill_worker` and `decode_worker` run. At its end
the worker writes how many of its steps took longer than their pace.
"""

import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from common.cli import application, command, execute
from common.messages import Role
from common.model.batch import StepInput
from compose.tune.profile import CostProfile, read_profile
from kvstore.host.config import WorkerConfig
from kvstore.host.flight import StepRunner
from kvstore.host.host import run_worker
from kvstore.host.parts import ModelParts, load_model_parts

LATE = 1.05
"""A step that took longer than so many times its pace was late: the model, or somebody else, had the core."""


class Pace(msgspec.Struct):
    """How well a worker kept its pace."""

    num_steps: int = 0
    num_late: int = 0
    paced_s: float = 0.0
    """What all steps should have taken."""
    taken_s: float = 0.0
    """What they took."""


class PacedRunner:
    """Runs each step with ``runner`` and makes it last. Used by one thread; owns ``pace``."""

    def __init__(self, runner: StepRunner, profile: CostProfile, pace: Pace) -> None:
        self._runner = runner
        self._profile = profile
        self._pace = pace

    @property
    def device(self) -> torch.device:
        """See :class:`kvstore.host.flight.StepRunner`."""
        return self._runner.device

    def forward(self, step: StepInput, token_ids: Tensor | None = None) -> Tensor:
        """See :class:`kvstore.host.flight.StepRunner`."""
        began = time.perf_counter()
        logits = self._runner.forward(step, token_ids)
        sizes = step.cu_seqlens_q[1:] - step.cu_seqlens_q[:-1]
        pace_s = self._profile.pieces_s(sizes.tolist(), (step.seq_lens - sizes).tolist())
        time.sleep(max(0.0, began + pace_s - time.perf_counter()))
        self._note(pace_s, time.perf_counter() - began)
        return logits

    def _note(self, pace_s: float, taken_s: float) -> None:
        self._pace.num_steps += 1
        self._pace.num_late += taken_s > LATE * pace_s
        self._pace.paced_s += pace_s
        self._pace.taken_s += taken_s


def main(role: str, profile_path: str, pace_path: str, argv: list[str]) -> None:
    """Run a worker until it is told to end."""
    profile, pace = read_profile(Path(profile_path)), Pace()

    def load(config: WorkerConfig) -> ModelParts:
        parts = load_model_parts(config)
        return replace(parts, runner=PacedRunner(parts.runner, profile, pace))

    app = application()
    app.default(command(WorkerConfig, lambda config: run_worker(config, Role(role), load)))
    try:
        execute(app, argv)
    finally:
        Path(pace_path).write_bytes(msgspec.json.encode(pace))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])

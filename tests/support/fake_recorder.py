"""Stands for CUDA graphs where there are none."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class FakeRecording:
    """Runs the pass again, into the same result, as a graph does."""

    recorder: "FakeRecorder"
    run: Callable[[], Tensor]
    result: Tensor

    def replay(self) -> Tensor:
        self.recorder.num_replays += 1
        return self.result.copy_(self.run())


@dataclass(slots=True)
class FakeRecorder:
    """Records by keeping the function."""

    sizes: list[int] = field(default_factory=list)
    """Rows of each recording."""
    num_replays: int = 0

    def record(self, run: Callable[[], Tensor]) -> FakeRecording:
        result = run().clone()
        self.sizes.append(len(result))
        return FakeRecording(self, run, result)

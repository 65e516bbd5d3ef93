"""Records passes of a model as CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class CudaRecording:
    """One CUDA graph and where it leaves its result."""

    graph: torch.cuda.CUDAGraph
    result: Tensor

    def replay(self) -> Tensor:
        """See :class:`common.model.decode_graphs.Recording`."""
        self.graph.replay()
        return self.result


class CudaRecorder:
    """Records graphs that share one pool of memory, since only one runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, run: Callable[[], Tensor]) -> CudaRecording:
        """See :class:`common.model.decode_graphs.Recorder`."""
        here = torch.cuda.current_stream()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(here):  # a recording that fails leaves its own stream behind as the current one
            side.wait_stream(here)
            with torch.cuda.stream(side):
                run()  # compiles and allocates what cannot be recorded
            here.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
        return CudaRecording(graph, result)

"""A hand-over between two processes on one GPU, split into what the messages cost and what the bytes cost."""

import statistics
from dataclasses import dataclass

import torch

from benchmarks import transfer
from common.messages import GRPC
from common.model.spec import LayerSpec
from kvstore.layout import KvLayout

LLAMA_3_8B = KvLayout((LayerSpec(8, 128, 128),) * 32, transfer.BLOCK_SIZE, torch.bfloat16)
NUM_TOKENS = 2000


@dataclass(frozen=True, slots=True)
class HandoverFigure:
    """One line of the table."""

    name: str
    seconds: float
    num_bytes: int = 0


def measure() -> list[HandoverFigure]:
    """Return control alone, and control with the KV of a prompt of 2,000 tokens."""
    sizes = transfer.Sizes(NUM_TOKENS // transfer.BLOCK_SIZE, 10, 200, LLAMA_3_8B, "cuda")
    measured = transfer.measure(sizes)
    control_s = statistics.median(measured.empty[0].values)
    named = {row.name: sizes.num_bytes / (statistics.median(row.values) * 1e9) for row in measured.rates}
    whole_s = named[transfer.pull_row(GRPC)]
    return [
        HandoverFigure("control", control_s),
        HandoverFigure(f"bytes of {NUM_TOKENS} tokens", whole_s - control_s, sizes.num_bytes),
        HandoverFigure("together", whole_s, sizes.num_bytes),
        HandoverFigure("a bare gRPC stream of as many bytes", named["bare gRPC stream"], sizes.num_bytes),
    ]

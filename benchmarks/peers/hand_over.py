"""Measures Baton's hand-over alone, between two processes, as ``benchmarks.transfer`` does; writes a line of JSON."""

import statistics
import sys

import msgspec
import torch

from benchmarks.peers.measurement import Part
from benchmarks.peers.names import HAND_OVER
from benchmarks.transfer import BLOCK_SIZE, LAYOUT, Sizes, measure, pull_row
from common.messages import GRPC
from compose.bench.figures import percentile

MIB = 256


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    sizes = Sizes(num_blocks=MIB * 2**20 // LAYOUT.block_bytes, repeats=3, handovers=300)
    measured = measure(sizes, (GRPC, "shm"))
    figures = {f"empty_p{p}_ms": 1e3 * percentile(measured.empty[0].values, p) for p in (50, 99)}
    rates = {row.name: statistics.median(row.values) for row in measured.rates}
    figures["grpc_gb_per_s"] = rates[pull_row(GRPC)]
    figures["shared_gb_per_s"] = rates[pull_row("shm")]
    figures["bytes_per_token"] = LAYOUT.block_bytes / BLOCK_SIZE
    part = Part(HAND_OVER, figures)
    sys.stdout.buffer.write(msgspec.json.encode(part) + b"\n")


if __name__ == "__main__":
    main()

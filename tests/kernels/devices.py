"""Where tests of the Triton kernels run: in the interpreter on a CPU, and on a GPU under the mark ``gpu``.

One process does one of the two, because triton reads TRITON_INTERPRET when it is imported.
"""

from dataclasses import replace

import pytest
import torch
from triton import knobs

from kernels.layer_kv import LayerKV
from tests.kernels.cases import Case

interpreted = pytest.mark.skipif(not knobs.runtime.interpret, reason="TRITON_INTERPRET is not set")
_available = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICES = [
    pytest.param("cpu", marks=interpreted),
    pytest.param("cuda", marks=[pytest.mark.gpu, _available]),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def moved(case: Case, device: str) -> Case:
    """Return ``case`` on ``device``, its layer still a view of its pool."""
    if device == "cpu":
        return case
    pool = case.pool.to(device)

    def view(old: torch.Tensor) -> torch.Tensor:
        return pool.as_strided(old.shape, old.stride(), old.storage_offset())

    rows = replace(
        case.rows,
        cu_seqlens_q=case.rows.cu_seqlens_q.to(device),
        seq_lens=case.rows.seq_lens.to(device),
        block_tables=case.rows.block_tables.to(device),
        slot_mapping=case.rows.slot_mapping.to(device),
    )
    return Case(case.q.to(device), LayerKV(view(case.kv.k), view(case.kv.v)), rows, pool)

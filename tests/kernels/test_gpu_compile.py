"""The Triton kernels compile to machine code for a Hopper GPU, also where there is none."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

pytest.importorskip("triton.backends.nvidia")

SHARED_BYTES = 227 * 1024
"""What one program may take on an H100 or H200."""

SPILLED_BYTES = 32
"""A few registers that wait outside the loop cost nothing; a tile that does not fit spills hundreds of bytes."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """One line of the compilation."""

    kernel: str
    dtype: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.compile_for_gpu"]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    lines = (line.split() for line in told.stdout.splitlines())
    return [Compiled(kernel, dtype, *map(int, numbers)) for kernel, dtype, *numbers in lines]


def test_every_kernel_fits_and_keeps_its_values_in_registers(compiled: list[Compiled]):
    assert {one.kernel for one in compiled} == {
        "_paged_attention_kernel",
        "_join_splits_kernel",
        "_prefill_attention_kernel",
        "_store_kv_kernel",
        "_move_blocks_kernel",
        "_rms_norm_kernel",
        "_add_rms_norm_kernel",
        "_rotary_kernel",
        "_silu_mul_kernel",
        "_sample_rows_kernel",
        "_penalise_rows_kernel",
    }
    assert all(one.shared_bytes <= SHARED_BYTES for one in compiled)
    assert [one for one in compiled if one.spilled_bytes > SPILLED_BYTES] == []

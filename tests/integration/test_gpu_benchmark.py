"""The GPU benchmark's serving part: the same processes and clients with a tiny model on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_serving import TINY, TINY_LOAD, measure, write_random


def test_a_prefill_and_a_decode_worker_serve_and_every_figure_is_there(tmp_path: Path):
    served = measure(write_random(tmp_path, TINY, TINY_LOAD.dtype, TINY_LOAD.device), TINY_LOAD)
    assert served.ttft_s > served.handover_s > 0
    assert served.control_s > 0
    assert served.itl_s > 0
    assert served.batch_itl_s > 0
    assert served.tokens_per_s > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be measured")
def test_without_a_gpu_it_says_what_was_not_measured():
    said = subprocess.run([sys.executable, "-m", "benchmarks.gpu"], capture_output=True, text=True, check=True).stdout
    assert "no CUDA device here" in said
    assert said.count("not measured") == 4

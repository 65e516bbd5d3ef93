"""Whole models on the Triton kernels give transformers' own greedy tokens; on a CPU in the interpreter."""

import random
from pathlib import Path

import pytest
import torch

from common.model.load import load_model
from common.model.runner import ModelRunner
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage
from tests.kernels.devices import interpreted, on_each_device
from tests.support.fake_recorder import FakeRecorder
from tests.support.packed_run import run_packed
from tests.support.reference import Reference
from tests.support.tiny_models import VOCAB_SIZE, build

LENGTHS = (1, 16, 26)
NUM_TOKENS = 3
BLOCK_SIZE = 16


@on_each_device
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v2"])
def test_greedy_tokens_equal_generate(family: str, device: str, tmp_path: Path):
    build(family, tmp_path)
    rng = random.Random(family)
    prompts = [rng.choices(range(3, VOCAB_SIZE), k=length) for length in LENGTHS]
    reference = Reference(tmp_path)
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    loaded = load_model(str(tmp_path), dtype="float32", device=device, max_model_len=None)
    spec = loaded.spec
    storage = KvStorage(KvLayout(spec.layers, BLOCK_SIZE, spec.dtype), num_blocks=12, device=spec.device)
    runner = ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE, "triton")
    assert run_packed(runner, prompts, storage.num_blocks, BLOCK_SIZE, NUM_TOKENS) == expected


@pytest.mark.parametrize("kernels", ["eager", pytest.param("triton", marks=interpreted)])
def test_steps_with_spare_rows_give_the_same_tokens(kernels: str, tmp_path: Path):
    build("gemma2", tmp_path)
    prompts = [[5, 6, 7], [8] * 17, [9, 10]]
    reference = Reference(tmp_path)
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    loaded = load_model(str(tmp_path), dtype="float32", device="cpu", max_model_len=64)
    spec = loaded.spec
    storage = KvStorage(KvLayout(spec.layers, BLOCK_SIZE, spec.dtype), num_blocks=12, device=spec.device)
    runner = ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE, kernels)
    recorder = FakeRecorder()
    runner.record(recorder, batch_sizes=(1, 4))
    assert not any(any(storage.read([block])) for block in range(12))  # recording wrote nothing
    assert run_packed(runner, prompts, storage.num_blocks, BLOCK_SIZE, NUM_TOKENS) == expected
    assert recorder.num_replays == NUM_TOKENS - 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3"])
def test_recorded_decode_steps_give_the_same_tokens(family: str, tmp_path: Path):
    build(family, tmp_path)
    rng = random.Random(family)
    prompts = [rng.choices(range(3, VOCAB_SIZE), k=length) for length in (1, 16, 33, 40, 61)]
    reference = Reference(tmp_path)
    expected = [reference.greedy(prompt, 12) for prompt in prompts]
    loaded = load_model(str(tmp_path), dtype="float32", device="cuda", max_model_len=None)
    spec = loaded.spec
    storage = KvStorage(KvLayout(spec.layers, BLOCK_SIZE, spec.dtype), num_blocks=32, device=spec.device)
    runner = ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE)
    runner.warm_up()
    assert runner.has_recordings
    assert not any(any(storage.read([block])) for block in range(32))  # warming up wrote nothing
    assert run_packed(runner, prompts, storage.num_blocks, BLOCK_SIZE, 12) == expected

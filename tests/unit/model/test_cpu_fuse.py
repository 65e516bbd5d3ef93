"""The compiled modules on a CPU: which ones a model gets, and that rows do not disturb each other's bits."""

from pathlib import Path

import pytest
import torch

from common.model.batch import Row, build_step
from common.model.cpu_layer import CpuDecoderLayer, CpuLinear
from common.model.cpu_stack import CpuDecoderStack
from common.model.load import load_model
from common.model.loaded import LoadedModel
from common.model.runner import ModelRunner
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage
from tests.kernels.native import built_native
from tests.support.tiny_models import build

BLOCK_SIZE = 16
LENGTHS = [5, 40, 17, 16, 33, 1, 60]


def load(family: str, directory: Path, dtype: str) -> LoadedModel:
    if built_native() is None:
        pytest.skip("there is no C compiler")
    build(family, directory)
    return load_model(str(directory), dtype=dtype, device="cpu", max_model_len=None)


def count(loaded: LoadedModel, kind: type[torch.nn.Module]) -> int:
    return sum(type(module) is kind for module in loaded.module.modules())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_every_layer_of_the_llama_pattern_is_compiled(family: str, tmp_path: Path):
    loaded = load(family, tmp_path, "bfloat16")
    assert count(loaded, CpuDecoderLayer) == len(loaded.spec.layers)
    assert count(loaded, CpuDecoderStack) == 1


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "olmo2"])
def test_other_models_get_compiled_linear_maps(family: str, tmp_path: Path):
    loaded = load(family, tmp_path, "float32")
    assert count(loaded, CpuDecoderLayer) == 0
    assert count(loaded, CpuLinear) > 4 * len(loaded.spec.layers)


def test_half_precision_that_is_not_compiled_stays_with_torch(tmp_path: Path):
    loaded = load("llama", tmp_path, "float16")
    assert count(loaded, CpuDecoderLayer) == count(loaded, CpuLinear) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_decode_step_gives_a_sequence_the_same_bits_in_any_batch(dtype: str, tmp_path: Path):
    loaded = load("llama", tmp_path, dtype)
    layout = KvLayout(loaded.spec.layers, BLOCK_SIZE, loaded.spec.dtype)
    storage = KvStorage(layout, 4 * len(LENGTHS) + 1, torch.device("cpu"))
    runner = ModelRunner(loaded, storage.layer_views(), BLOCK_SIZE)
    rows = []
    for index, length in enumerate(LENGTHS):
        table = list(range(4 * index, 4 * index + 4))
        prompt = [(7 * index + position) % 500 for position in range(length)]
        runner.forward(build_step([Row(prompt, 0, table, wants_logits=False)], BLOCK_SIZE))
        rows.append(Row([index + 3], length, table, wants_logits=True))
    together = runner.forward(build_step(rows, BLOCK_SIZE))
    for begin, end in ((0, 1), (1, 3), (2, 7), (6, 7)):
        assert torch.equal(runner.forward(build_step(rows[begin:end], BLOCK_SIZE)), together[begin:end])

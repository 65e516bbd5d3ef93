"""The straight way through a model: who has one, and that it computes what transformers' own code does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from common.model.batch import Row, build_step
from common.model.load import load_model
from common.model.runner import ModelRunner
from common.model.straight import straight_model
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage
from tests.kernels.native import built_native
from tests.support.tiny_models import build

BLOCK_SIZE = 16
KNOWN = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]


@pytest.fixture(autouse=True)
def _needs_the_library() -> None:
    if built_native() is None:
        pytest.skip("there is no C compiler")


@pytest.mark.parametrize("kernels", ["cpu", "numba"])
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 0.03)])
@pytest.mark.parametrize("family", KNOWN)
def test_the_logits_are_those_of_the_whole_code(family: str, dtype: str, limit: float, kernels: str, tmp_path: Path):
    build(family, tmp_path)
    loaded = load_model(str(tmp_path), dtype=dtype, device="cpu", max_model_len=128)
    assert loaded.straight is not None
    rows = [
        Row(list(range(3, 60)), 0, [5, 1, 7, 2], wants_logits=True),
        Row([9], 0, [0], wants_logits=False),
        Row(list(range(100)), 0, list(range(10, 17)), wants_logits=True, wants_all_logits=True),
    ]
    found = []
    for version in (loaded, replace(loaded, straight=None)):
        storage = KvStorage(KvLayout(loaded.spec.layers, BLOCK_SIZE, loaded.spec.dtype), 20, torch.device("cpu"))
        runner = ModelRunner(version, storage.layer_views(), BLOCK_SIZE, kernels)
        found.append(runner.forward(build_step(rows, BLOCK_SIZE)))
    torch.testing.assert_close(*found, atol=limit, rtol=limit)


def test_a_model_that_is_not_known_has_none(tmp_path: Path):
    for family in ("gemma2", "gpt_neox"):
        build(family, tmp_path / family)
        assert load_model(str(tmp_path / family), dtype="float32", device="cpu", max_model_len=None).straight is None


def test_angles_that_depend_on_the_length_are_left_to_the_model(tmp_path: Path):
    build("llama", tmp_path)
    module = load_model(str(tmp_path), dtype="float32", device="cpu", max_model_len=64).module
    assert straight_model(module, 64) is not None
    module.model.rotary_emb.rope_type = "dynamic"
    assert straight_model(module, 64) is None


def test_half_precision_goes_through_the_whole_code(tmp_path: Path):
    build("llama", tmp_path)
    assert load_model(str(tmp_path), dtype="float16", device="cpu", max_model_len=None).straight is None

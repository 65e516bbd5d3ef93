"""The last layer computes only what is wanted; logits and stored keys and values are what they were."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.model.attention import PagedStep, attending
from common.model.batch import Row, build_step
from common.model.fuse import fuse
from common.model.load import load_model
from common.model.loaded import LoadedModel
from common.model.runner import ModelRunner
from common.model.wanted_rows import WantedRows
from kernels.elementwise import EagerElementwise
from kernels.packed_rows import PackedRows
from kernels.select import EagerKernels
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage
from tests.kernels.native import built_native
from tests.support.tiny_models import VOCAB_SIZE, build
from tests.unit.model.test_fuse import attentions, load

BLOCK_SIZE = 16
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03}
LENGTHS = [40, 1, 70, 5, 200]
PATTERNS = {"some": [True, True, False, True, False], "none": [False] * 5, "one": [False, False, True, False, False]}


def rows_of(wants_logits: list[bool]) -> list[Row]:
    prompts = [[(7 * index + 11 * position) % VOCAB_SIZE for position in range(n)] for index, n in enumerate(LENGTHS)]
    tables = [list(range(14 * index, 14 * index + 14)) for index in range(len(LENGTHS))]
    return [Row(prompt, 0, *rest) for prompt, *rest in zip(prompts, tables, wants_logits, strict=True)]


def compute(loaded: LoadedModel, rows: list[Row], kernels: str) -> tuple[Tensor, Tensor]:
    """Return the logits, and all of the pool."""
    layout = KvLayout(loaded.spec.layers, BLOCK_SIZE, loaded.spec.dtype)
    storage = KvStorage(layout, 14 * len(LENGTHS), torch.device("cpu"))
    layers = storage.layer_views()
    logits = ModelRunner(loaded, layers, BLOCK_SIZE, kernels).forward(build_step(rows, BLOCK_SIZE))
    return logits, torch.stack([torch.stack((layer.k, layer.v)) for layer in layers])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["cpu", "numba"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_leaving_rows_out_changes_nothing(family: str, kernels: str, dtype: str, pattern: str, tmp_path: Path):
    if built_native() is None:
        pytest.skip("there is no C compiler")
    build(family, tmp_path)
    loaded = load_model(str(tmp_path), dtype=dtype, device="cpu", max_model_len=None)
    assert loaded.narrows
    wanted = rows_of(PATTERNS[pattern])
    all_logits, all_kv = compute(loaded, [replace(row, wants_all_logits=True) for row in wanted], kernels)
    lasts = torch.tensor(LENGTHS).cumsum(0)[torch.tensor(PATTERNS[pattern])] - 1
    logits, kv = compute(loaded, wanted, kernels)
    torch.testing.assert_close(logits, all_logits[lasts], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(kv, all_kv, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@torch.inference_mode()
@pytest.mark.parametrize("wanted", [[5, 9, 39], []])
def test_fused_layers_leave_rows_out(wanted: list[int], tmp_path: Path):
    model = load("llama", tmp_path)
    token_ids = torch.arange(40).view(1, 40) * 11 % VOCAB_SIZE
    expected = model(token_ids, use_cache=False).logits
    fuse(model, attentions(model), EagerElementwise())
    unread = PackedRows(*torch.empty(4, 0))
    rows = WantedRows(torch.tensor(wanted, dtype=torch.int64), unread)
    with attending(PagedStep(EagerKernels(), (), (), unread, torch.arange(40), rows)):
        actual = model(token_ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected[:, wanted], atol=2e-4, rtol=2e-4)

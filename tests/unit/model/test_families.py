"""Every family of models gives transformers' own greedy tokens on paged KV, in chunks and packed with others."""

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.model.load import load_model
from common.model.loaded import LoadedModel
from common.model.runner import ModelRunner
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage
from tests.support.packed_run import run_packed
from tests.support.reference import Reference
from tests.support.tiny_models import EOS_TOKEN_ID, FAMILIES, VOCAB_SIZE, build

LENGTHS = (1, 15, 16, 17, 33, 70)
NUM_TOKENS = 10
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Expected:
    """A loaded family with prompts and the tokens that follow them."""

    loaded: LoadedModel
    prompts: list[list[int]]
    tokens: list[list[int]]


@pytest.fixture(scope="module", params=FAMILIES)
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    family: str = request.param
    directory = tmp_path_factory.mktemp(family)
    build(family, directory)
    reference = Reference(directory)
    rng = random.Random(family)
    prompts = [rng.choices(range(3, VOCAB_SIZE), k=length) for length in LENGTHS]
    tokens = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    assert len({token for answer in tokens for token in answer}) > 10  # the model does not repeat itself
    loaded = load_model(str(directory), dtype="float32", device="cpu", max_model_len=None)
    return Expected(loaded, prompts, tokens)


@pytest.mark.parametrize("kernels", ["eager", "cpu"])
def test_greedy_tokens_equal_generate(expected: Expected, kernels: str):
    spec = expected.loaded.spec
    storage = KvStorage(KvLayout(spec.layers, BLOCK_SIZE, spec.dtype), num_blocks=24, device=spec.device)
    runner = ModelRunner(expected.loaded, storage.layer_views(), BLOCK_SIZE, kernels)
    runner.warm_up()
    assert not any(storage.read([block])[0] for block in range(24))  # warming up wrote nothing
    assert run_packed(runner, expected.prompts, storage.num_blocks, BLOCK_SIZE, NUM_TOKENS) == expected.tokens


def test_what_is_known_after_load(expected: Expected, tmp_path: Path):
    spec = expected.loaded.spec
    assert spec.eos_token_ids == (EOS_TOKEN_ID,)
    assert spec.vocab_size == VOCAB_SIZE
    assert spec.max_model_len == 2048
    assert spec.dtype == torch.float32
    assert len(spec.layers) == len(expected.loaded.attention) == expected.loaded.module.config.num_hidden_layers

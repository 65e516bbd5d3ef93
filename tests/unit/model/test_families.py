"""Every family of models gives transformers' own greedy tokens on paged KV, in chunks and packed with others."""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from common.model.batch import Row, build_step
from common.model.load import load_model
from common.model.loaded import LoadedModel
from common.model.runner import ModelRunner
from common.model.sampler import SampleRow, sample
from common.sampling import SamplingParams
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage
from tests.support.reference import Reference
from tests.support.tiny_models import EOS_TOKEN_ID, FAMILIES, VOCAB_SIZE, build

LENGTHS = (1, 15, 16, 17, 33, 70)
NUM_TOKENS = 10
BLOCK_SIZE = 16
CHUNK = 19
"""Neither a multiple of the block size nor of a window or attention chunk."""


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


@dataclass(slots=True)
class Sequence:
    """A prompt on its way through chunks and decode steps."""

    token_ids: list[int]
    block_ids: list[int]
    num_computed: int = 0
    output: list[int] = field(default_factory=list)

    def next_row(self, chunk: int) -> Row:
        piece = self.token_ids[self.num_computed :][:chunk]
        row = Row(piece, self.num_computed, self.block_ids, self.num_computed + len(piece) == len(self.token_ids))
        self.num_computed += len(piece)
        return row


def run_packed(runner: ModelRunner, prompts: list[list[int]], num_blocks: int) -> list[list[int]]:
    """Run all prompts in common steps, long ones in chunks while short ones decode."""
    order = random.Random(1).sample(range(num_blocks), num_blocks)
    blocks = [-(-(len(prompt) + NUM_TOKENS) // BLOCK_SIZE) for prompt in prompts]
    waiting = [
        Sequence(list(prompt), [order.pop() for _ in range(n)]) for prompt, n in zip(prompts, blocks, strict=True)
    ]
    greedy = SamplingParams(NUM_TOKENS, temperature=0.0)
    while running := [sequence for sequence in waiting if len(sequence.output) < NUM_TOKENS]:
        rows = [sequence.next_row(CHUNK) for sequence in running]
        sampled = [sequence for sequence, row in zip(running, rows, strict=True) if row.wants_logits]
        logits = runner.forward(build_step(rows, BLOCK_SIZE))
        assert logits.shape == (len(sampled), VOCAB_SIZE)
        assert logits.dtype == torch.float32
        tokens = sample(logits, [SampleRow(greedy, 0, len(sequence.token_ids)) for sequence in sampled])
        for sequence, token in zip(sampled, tokens, strict=True):
            sequence.output.append(token)
            sequence.token_ids.append(token)
    return [sequence.output for sequence in waiting]


@pytest.mark.parametrize("kernels", ["eager", "cpu"])
def test_greedy_tokens_equal_generate(expected: Expected, kernels: str):
    spec = expected.loaded.spec
    storage = KvStorage(KvLayout(spec.layers, BLOCK_SIZE, spec.dtype), num_blocks=24, device=spec.device)
    runner = ModelRunner(expected.loaded, storage.layer_views(), BLOCK_SIZE, kernels)
    runner.warm_up()
    assert not any(storage.read([block])[0] for block in range(24))  # warming up wrote nothing
    assert run_packed(runner, expected.prompts, storage.num_blocks) == expected.tokens


def test_what_is_known_after_load(expected: Expected, tmp_path: Path):
    spec = expected.loaded.spec
    assert spec.eos_token_ids == (EOS_TOKEN_ID,)
    assert spec.vocab_size == VOCAB_SIZE
    assert spec.max_model_len == 2048
    assert spec.dtype == torch.float32
    assert len(spec.layers) == len(expected.loaded.attention) == expected.loaded.module.config.num_hidden_layers

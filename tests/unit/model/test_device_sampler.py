"""Sampling on the GPU chooses the tokens that the CPU chooses."""

import random

import pytest
import torch

from common.errors import InternalError
from common.model.device_sampler import can_sample, sample_on_device
from common.model.history import TokenHistory
from common.model.sample_row import SampleRow
from common.model.sampled_ids import SampledIds
from common.model.sampler import sample
from common.sampling import SamplingParams
from tests.kernels.devices import on_each_device

VOCAB = 3000
"""More than one turn of the kernel's loops, and not a multiple."""


def row(position: int, *, tokens: list[int] | None = None, **params: float) -> SampleRow:
    """A row whose prompt ends, and whose output begins, in the middle of ``tokens``."""
    history = None
    if tokens is not None:
        history = TokenHistory(len(tokens) // 2)
        history.extend(tokens)
    return SampleRow(SamplingParams(1000, seed=7, **params), 1, position, 10, history)


def sampled(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    return SampledIds(sample_on_device(logits, rows)).tolist()


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.01},
    {"top_k": 1},
    {"top_k": 7, "temperature": 3.0},
    {"top_k": VOCAB + 5},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999999, "temperature": 5.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.05},
    {"min_p": 1.0},
]


@on_each_device
def test_the_tokens_are_those_of_the_cpu(device: str):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(2 * len(SETTINGS), VOCAB, generator=generator)
    logits[:, 5] = logits[:, 9]  # a tie
    logits[1, 100:] = float("-inf")
    rows = [row(position, **setting) for position, setting in enumerate(SETTINGS * 2)]
    assert sampled(logits.to(device), rows) == sample(logits, rows)


@on_each_device
def test_penalties(device: str):
    logits = 3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    rng = random.Random(5)
    before = [logits[0].topk(40).indices.tolist() + rng.choices(range(VOCAB), k=30) for _ in range(4)]
    rows = [
        row(0, tokens=before[0] * 2, repetition_penalty=1.7, temperature=0.0),
        row(1, tokens=before[1], presence_penalty=2.0, frequency_penalty=0.5, top_k=5),
        row(2),
        row(3, tokens=before[3][:3], repetition_penalty=0.5, top_p=0.7),
    ]
    assert sampled(logits.to(device), rows) == sample(logits, rows)


@on_each_device
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_error(bad: float, device: str):
    logits = torch.randn(2, 100)
    logits[1, 3] = bad
    with pytest.raises(InternalError, match="not finite"):
        sampled(logits.to(device), [row(0), row(0)])


@on_each_device
def test_a_row_without_a_token_gives_the_next_step_one_that_can_be_looked_up(device: str):
    ids = SampledIds(torch.tensor([7, -1, 5], device=device))
    assert ids.input_ids(torch.tensor([2, 1, 0], device=device)).tolist() == [5, 0, 7]
    with pytest.raises(InternalError, match="not finite"):
        ids.tolist()


@on_each_device
def test_a_row_without_any_possible_token_is_an_error(device: str):
    with pytest.raises(InternalError, match="not finite"):
        sampled(torch.full((1, 100), float("-inf"), device=device), [row(0, top_p=0.5)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_rows_of_both_kinds_come_back_in_order():
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = [row(0), row(1, typical_p=0.8), row(2, top_k=3), row(3, min_tokens=20, temperature=0.0)]
    assert sample(logits.cuda(), rows) == sample(logits, rows)


def test_what_only_the_cpu_knows_is_left_to_it():
    assert can_sample(row(0, top_p=0.5, tokens=[1, 2], repetition_penalty=2.0))
    for params in (
        {"typical_p": 0.5},
        {"logit_bias": ((1, 2.0),)},
        {"allowed_token_ids": (1,)},
        {"bad_words": ((1,),)},
        {"min_tokens": 20},
    ):
        assert not can_sample(row(0, **params))  # type: ignore[arg-type]

"""Fused models compute what they computed before; what is not known stays as it is."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.model.fuse import Fused, fuse
from common.model.fused_norm import FusedRmsNorm
from common.model.merged_linear import MergedLinear, merge, mergeable
from kernels.elementwise import EagerElementwise, Elementwise
from kernels.gpu.elementwise import TritonElementwise
from kernels.norm_form import NormForm
from tests.kernels.devices import on_each_device
from tests.support.tiny_models import FAMILIES, VOCAB_SIZE, build

EXPECTED = {  # what is found in two layers
    "llama": Fused(merged=2, norms=5, rotaries=2, mlps=2, residuals=4),
    "qwen3": Fused(merged=2, norms=9, rotaries=2, mlps=2, residuals=4),
    "gemma2": Fused(merged=2, norms=9, rotaries=2, mlps=0),
    "gpt_oss": Fused(merged=2, norms=5, rotaries=0, mlps=0),
    "phi3": Fused(merged=0, norms=5, rotaries=2, mlps=0),
    "glm4": Fused(merged=2, norms=9, rotaries=0, mlps=0),
    "gpt2": Fused(),
}


def load(family: str, directory: Path, device: str = "cpu") -> PreTrainedModel:
    build(family, directory)
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval().to(device)


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    return [
        module for module in model.modules() if hasattr(module, "layer_idx") and "Attention" in type(module).__name__
    ]


@torch.inference_mode()
def check_family(family: str, directory: Path, elementwise: Elementwise, device: str) -> Fused:
    model = load(family, directory, device)
    token_ids = torch.arange(40, device=device).view(1, 40) * 11 % VOCAB_SIZE
    expected = model(token_ids, use_cache=False).logits
    num_parameters = len(list(model.parameters()))
    found = fuse(model, attentions(model), elementwise)
    assert len(list(model.parameters())) <= num_parameters
    actual = model(token_ids, use_cache=False).logits
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=2e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_the_same_logits(family: str, tmp_path: Path):
    found = check_family(family, tmp_path, EagerElementwise(), "cpu")
    if family in EXPECTED:
        assert found == EXPECTED[family]


@on_each_device
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_the_triton_kernels_inside_a_model(family: str, device: str, tmp_path: Path):
    assert check_family(family, tmp_path, TritonElementwise(), device) == EXPECTED[family]


class CountsNorms(EagerElementwise):
    """Counts norms of their own, and of sums."""

    def __init__(self) -> None:
        self.num_alone = self.num_of_sums = 0

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
        self.num_alone += 1
        return super().rms_norm(x, weight, form)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, form: NormForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_of_sums += 1
        summed = x + residual
        return summed, EagerElementwise().rms_norm(summed, weight, form)


@torch.inference_mode()
def test_every_residual_sum_is_computed_with_the_norm_behind_it(tmp_path: Path):
    counts, model = CountsNorms(), load("llama", tmp_path)
    fuse(model, attentions(model), counts)
    for _ in range(2):  # the second pass finds nothing left of the first
        counts.num_alone = counts.num_of_sums = 0
        model(torch.arange(7).view(1, 7), use_cache=False)
        assert (counts.num_alone, counts.num_of_sums) == (1, 4)  # only the first norm follows no sum


def test_a_norm_that_is_asked_for_something_else_computes_it():
    norm = FusedRmsNorm(nn.Parameter(torch.rand(8)), NormForm(1e-6), EagerElementwise())
    x, residual, other = torch.randn(3, 2, 8)
    alone = norm(other)
    summed = norm.sum_ahead(x, residual)
    assert torch.equal(norm(other), alone)
    summed += 1.0
    assert torch.equal(norm(summed), EagerElementwise().rms_norm(summed, norm.weight, NormForm(1e-6)))


def test_merged_projections_share_one_product_and_the_memory():
    owner = nn.Module()
    for name, width in (("a", 4), ("b", 6)):
        owner.register_module(name, nn.Linear(3, width))
    x, other = torch.randn(2, 5, 3)
    expected = [owner.a(x), owner.b(x), owner.a(other)]
    assert isinstance(merge(owner, ["a", "b"]), MergedLinear)
    assert owner.a.weight.untyped_storage().data_ptr() == owner.b.weight.untyped_storage().data_ptr()
    assert owner.a(x).untyped_storage().data_ptr() == owner.b(x).untyped_storage().data_ptr()
    torch.testing.assert_close([owner.a(x), owner.b(x), owner.a(other)], expected)


def test_a_part_that_is_asked_again_or_out_of_order_is_right():
    owner = nn.Module()
    owner.a, owner.b = nn.Linear(3, 4, bias=False), nn.Linear(3, 6, bias=False)
    x = torch.randn(2, 3)
    expected = owner.a(x), owner.b(x)
    merge(owner, ["a", "b"])
    for _ in range(2):
        torch.testing.assert_close(
            (owner.a(x), owner.a(x), owner.b(x), owner.b(x)), (expected[0],) * 2 + (expected[1],) * 2
        )
    x.zero_()  # the last part was taken, so nothing is left of the old product
    torch.testing.assert_close(owner.b(x), torch.zeros(2, 6))


def test_only_plain_projections_of_one_input_are_merged():
    assert mergeable([nn.Linear(3, 4), nn.Linear(3, 5)])
    assert not mergeable([nn.Linear(3, 4), nn.Linear(2, 5)])
    assert not mergeable([nn.Linear(3, 4), nn.Linear(3, 5, bias=False)])
    assert not mergeable([nn.Linear(3, 4), None])
    assert not mergeable([nn.Linear(3, 4), nn.Bilinear(3, 3, 4)])

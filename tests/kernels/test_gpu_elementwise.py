"""The fused element-wise Triton kernels against their eager twins."""

import pytest
import torch
from torch import Tensor

from kernels.elementwise import EagerElementwise
from kernels.gpu.elementwise import TritonElementwise
from kernels.norm_form import NormForm
from tests.kernels.devices import on_each_device

EAGER, FUSED = EagerElementwise(), TritonElementwise()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def check(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (1, 5, 100), (1, 7, 3, 24), (2, 5000)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    for form in (NormForm(1e-5), NormForm(1e-6, offset=1.0, rounds_first=False), NormForm(0.5, rounds_first=False)):
        check(FUSED.rms_norm(x.to(device), weight.to(device), form), EAGER.rms_norm(x, weight, form))


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 64), (1, 5, 100), (2, 5000)], ids=str)
def test_the_norm_of_a_residual_sum(shape: tuple[int, ...], dtype: torch.dtype, device: str):
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    for form in (NormForm(1e-5), NormForm(1e-6, offset=1.0, rounds_first=False)):
        expected = EAGER.add_rms_norm(x, residual, weight, form)
        summed, normed = FUSED.add_rms_norm(x.to(device), residual.to(device), weight.to(device), form)
        check(summed, expected[0])  # the interpreter cuts bfloat16 off instead of rounding it
        check(normed, expected[1])


@on_each_device
def test_rms_norm_of_heads_inside_a_merged_projection(device: str):
    merged = torch.randn(1, 5, 200)
    heads, weight = merged[..., 24:168].view(1, 5, 6, 24), torch.randn(24)
    there = merged.to(device)[..., 24:168].view(1, 5, 6, 24)
    form = NormForm(1e-6)
    check(FUSED.rms_norm(there, weight.to(device), form), EAGER.rms_norm(heads, weight, form))
    turned = torch.randn(24, 5).T
    check(FUSED.rms_norm(turned.to(device), weight.to(device), form), EAGER.rms_norm(turned, weight, form))


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("q_heads", "k_heads", "dim"), [(1, 1, 2), (9, 3, 64), (4, 4, 24), (7, 1, 80)])
def test_rotary(q_heads: int, k_heads: int, dim: int, dtype: torch.dtype, device: str):
    merged = torch.randn(1, 6, (q_heads + k_heads) * dim).to(dtype)
    cos, sin = torch.randn(2, 1, 6, dim).to(dtype)

    def heads(packed: Tensor) -> tuple[Tensor, Tensor]:
        q, k = packed.split([q_heads * dim, k_heads * dim], dim=-1)
        return q.view(1, 6, q_heads, dim).transpose(1, 2), k.view(1, 6, k_heads, dim).transpose(1, 2)

    expected = EAGER.rotary(*heads(merged), cos, sin)
    actual = FUSED.rotary(*heads(merged.to(device)), cos.to(device), sin.to(device))
    for one, other in zip(actual, expected, strict=True):
        assert one.shape == other.shape
        check(one, other)


@on_each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 10), (1, 5, 2 * 1500)], ids=str)
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype, device: str):
    gate_up = (4 * torch.randn(shape)).to(dtype)
    check(FUSED.silu_mul(gate_up.to(device)), EAGER.silu_mul(gate_up))
    check(
        FUSED.silu_mul(gate_up.to(device).T.contiguous().T if len(shape) == 2 else gate_up.to(device)),
        EAGER.silu_mul(gate_up),
    )

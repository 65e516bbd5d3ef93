"""The Triton attention kernels against their eager twin."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.gpu.kernels import TritonKernels
from kernels.gpu.paged_attention import num_splits, paged_attention
from kernels.paged_attention import paged_attention_eager
from tests.kernels.cases import Case, Shape, new_case
from tests.kernels.devices import moved, on_each_device
from tests.kernels.test_paged_attention import FORMS, TOLERANCE

MIXED = [(1, 17), (5, 5), (2, 33), (23, 61), (1, 1)]
"""Decode rows, short rows and chunks, with and without earlier keys, at block edges."""

PLAIN = FORMS["plain"]


def check(case: Case, form: AttentionForm, device: str, sinks: Tensor | None = None) -> None:
    expected = paged_attention_eager(case.q, case.kv, case.rows, form, sinks)
    there = moved(case, device)
    on_device = None if sinks is None else sinks.to(device)
    actual = TritonKernels(torch.device(device)).paged_attention(there.q, there.kv, there.rows, form, on_device)
    tolerance = TOLERANCE[case.q.dtype]
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


@on_each_device
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, device: str):
    check(new_case(Shape(), MIXED), FORMS[form], device)


@on_each_device
@pytest.mark.parametrize("form", ["plain", "window", "softcap and chunk"])
def test_sinks(form: str, device: str):
    check(new_case(Shape(), MIXED), FORMS[form], device, torch.linspace(-1, 1, 4))


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["plain", "softcap and window"])
def test_every_dtype(dtype: torch.dtype, form: str, device: str):
    check(new_case(Shape(dtype=dtype), MIXED), FORMS[form], device, torch.linspace(-1, 1, 4).to(dtype))


@on_each_device
@pytest.mark.parametrize("group", [1, 3, 5, 7, 8, 16])
def test_every_group(group: int, device: str):
    check(new_case(Shape(kv_heads=2, group=group), MIXED[:4]), PLAIN, device)


@on_each_device
@pytest.mark.parametrize(("k_dim", "v_dim"), [(1, 8), (15, 17), (64, 64), (80, 64), (192, 128), (256, 256)])
def test_every_width(k_dim: int, v_dim: int, device: str):
    check(new_case(Shape(k_dim=k_dim, v_dim=v_dim), MIXED[:4]), AttentionForm(k_dim**-0.5), device)


@on_each_device
@pytest.mark.parametrize("block_size", [1, 5, 8, 128])
def test_every_block_size(block_size: int, device: str):
    check(new_case(Shape(block_size=block_size), MIXED[:4]), FORMS["window and chunk"], device)
    check(new_case(Shape(block_size=block_size), MIXED[:4]), PLAIN, device)


@on_each_device
@pytest.mark.parametrize("seq_len", [1, 15, 16, 31, 32, 33, 64, 65])
def test_block_and_tile_edges(seq_len: int, device: str):
    check(new_case(Shape(), [(1, seq_len)]), PLAIN, device)
    check(new_case(Shape(), [(seq_len, seq_len)]), PLAIN, device)
    check(new_case(Shape(dtype=torch.float16), [((seq_len + 1) // 2, seq_len)]), FORMS["window"], device)


@on_each_device
@pytest.mark.parametrize(("splits", "form"), [(2, "plain"), (3, "window"), (7, "softcap and chunk")])
def test_splits_join_also_when_some_have_no_keys(splits: int, form: str, device: str):
    case = new_case(Shape(), [(1, 1), (1, 70), (3, 40), (1, 129)])
    sinks = torch.linspace(-2, 2, 4)
    there = moved(case, device)
    out = torch.full_like(there.q, float("nan"))
    paged_attention(out, there.q, there.kv, there.rows, FORMS[form], sinks.to(device), splits)
    expected = paged_attention_eager(case.q, case.kv, case.rows, FORMS[form], sinks)
    torch.testing.assert_close(out.cpu(), expected, atol=2e-5, rtol=2e-5)


@on_each_device
def test_long_sequences_are_split(device: str):
    check(new_case(Shape(), [(1, 700), (1, 33), (1, 1100)]), PLAIN, device)


def test_splits_fill_the_device_and_no_more():
    assert num_splits(64, 8, 4096, 132) == 3
    assert num_splits(1, 8, 8192, 132) == 32  # not shorter than 256 keys
    assert num_splits(1, 1, 10**6, 132) == 64
    assert num_splits(512, 8, 4096, 132) == num_splits(1, 1, 100, 132) == 1


@on_each_device
def test_large_scores_neither_overflow_nor_lose_the_sum(device: str):
    check(new_case(Shape(), MIXED), AttentionForm(400.0), device)
    check(new_case(Shape(), MIXED), AttentionForm(400.0), device, torch.full((4,), 50.0))


@on_each_device
def test_a_row_without_a_sequence_disturbs_nobody(device: str):
    """A captured step has rows to spare: they have no keys, and their tables name no block."""
    case = new_case(Shape(), [(1, 40), (1, 70)])
    spare = replace(
        case.rows,
        cu_seqlens_q=torch.tensor([0, 1, 2, 3], dtype=torch.int32),
        seq_lens=torch.tensor([40, 70, 0], dtype=torch.int32),
        block_tables=torch.cat((case.rows.block_tables, torch.full((1, 6), -1, dtype=torch.int32))),
        slot_mapping=torch.cat((case.rows.slot_mapping, torch.tensor([-1]))),
    )
    padded = replace(case, q=torch.cat((case.q, case.q[:1])), rows=spare)
    there = moved(padded, device)
    actual = TritonKernels(torch.device(device)).paged_attention(there.q, there.kv, there.rows, PLAIN, None)
    expected = paged_attention_eager(case.q, case.kv, case.rows, PLAIN, None)
    torch.testing.assert_close(actual[:2].cpu(), expected, atol=2e-5, rtol=2e-5)
    assert torch.equal(actual[2].cpu(), torch.zeros(4, 16))


@on_each_device
def test_a_query_in_any_memory_order_is_read_right(device: str):
    case = moved(new_case(Shape(), MIXED), device)
    kernels = TritonKernels(torch.device(device))
    expected = kernels.paged_attention(case.q, case.kv, case.rows, PLAIN, None)
    for turned in (
        case.q.transpose(0, 1).contiguous().transpose(0, 1),
        case.q.transpose(1, 2).contiguous().transpose(1, 2),
    ):
        assert torch.equal(kernels.paged_attention(turned, case.kv, case.rows, PLAIN, None), expected)

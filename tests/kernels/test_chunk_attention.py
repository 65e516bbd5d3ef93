"""The compiled attention of prompts in bfloat16: right for every form, and the same bits however a prompt is cut."""

import pytest
import torch
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.cpu.native.operations import Native, new_native
from kernels.cpu.plan import CpuPlan
from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows
from kernels.paged_attention import paged_attention_eager
from tests.kernels.cases import Case, Shape, new_case

FORMS = {
    "causal": AttentionForm(0.1),
    "window": AttentionForm(0.1, window=37),
    "chunk": AttentionForm(0.1, chunk=48),
}


@pytest.fixture(params=[1, 2])
def native(request: pytest.FixtureRequest) -> Native:
    operations = new_native(request.param)
    if operations is None or not operations.can_attend_chunk(
        torch.bfloat16, new_case(Shape(dtype=torch.bfloat16), [(1, 1)]).kv, FORMS["causal"]
    ):
        pytest.skip("this processor has no bfloat16 dot product, or there is no C compiler")
    return operations


def attend(native: Native, case: Case, form: AttentionForm, sinks: Tensor | None) -> Tensor:
    plan = CpuPlan.of(case.rows, case.kv.num_blocks, case.kv.block_size)
    assert not len(plan.row_ids)
    out = torch.full((*case.q.shape[:2], case.kv.v.shape[3]), float("nan"), dtype=torch.bfloat16)
    for chunk in plan.chunks:
        native.attend_chunk(case.q, out, case.kv, chunk, form, sinks)
    return out


def expected(case: Case, form: AttentionForm, sinks: Tensor | None) -> Tensor:
    wide = LayerKV(case.kv.k.float(), case.kv.v.float())
    return paged_attention_eager(case.q.float(), wide, case.rows, form, sinks)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(
    ("kv_heads", "group", "k_dim", "v_dim", "block_size"),
    [(3, 3, 64, 64, 16), (1, 1, 2, 1, 8), (2, 7, 80, 40, 16), (1, 16, 128, 128, 32), (2, 1, 192, 130, 128)],
)
def test_it_equals_the_definition(
    native: Native, form: str, with_sinks: bool, kv_heads: int, group: int, k_dim: int, v_dim: int, block_size: int
):
    shape = Shape(kv_heads, group, k_dim, v_dim, block_size, torch.bfloat16)
    case = new_case(shape, [(5, 5), (64, 64), (65, 200), (6, 129), (150, 151), (7, 63)])
    sinks = torch.linspace(-2, 3, kv_heads * group) if with_sinks else None
    actual = attend(native, case, FORMS[form], sinks)
    torch.testing.assert_close(actual.float(), expected(case, FORMS[form], sinks), atol=2e-2, rtol=2e-2)


def test_scores_that_are_large_or_far_apart_neither_overflow_nor_vanish(native: Native):
    case = new_case(Shape(1, 2, 64, 64, 16, torch.bfloat16), [(100, 300)])
    case.q.mul_(60)
    torch.testing.assert_close(
        attend(native, case, FORMS["causal"], None).float(), expected(case, FORMS["causal"], None), atol=3e-2, rtol=3e-2
    )


@pytest.mark.parametrize("form", FORMS)
def test_the_bits_do_not_depend_on_where_a_prompt_is_cut(native: Native, form: str):
    whole = new_case(Shape(2, 3, 64, 64, 16, torch.bfloat16), [(300, 300)])
    together = attend(native, whole, FORMS[form], None)
    for begin, end in ((0, 5), (5, 70), (70, 205), (205, 300)):
        rows = PackedRows(
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([end], dtype=torch.int32),
            block_tables=whole.rows.block_tables,
            slot_mapping=whole.rows.slot_mapping[begin:end],
        )
        part = attend(native, Case(whole.q[begin:end], whole.kv, rows, whole.pool), FORMS[form], None)
        assert torch.equal(part, together[begin:end])

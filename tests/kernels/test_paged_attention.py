"""Paged attention: the eager version against the definition, the CPU version against the eager one."""

import math

import pytest
import torch
from torch import Tensor

from kernels.attention_form import AttentionForm
from kernels.cpu import kernels as cpu
from kernels.cpu.kernels import CpuKernels
from kernels.paged_attention import paged_attention_eager
from tests.kernels.cases import Case, Shape, new_case
from tests.kernels.native import built_native

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

MIXED = [(1, 1), (1, 15), (1, 16), (1, 17), (5, 5), (2, 33), (40, 40), (1, 100), (23, 61), (4, 50)]
"""Decode rows, short rows and chunks, with and without earlier keys, at block edges."""

FORMS = {
    "plain": AttentionForm(0.25),
    "window": AttentionForm(0.25, window=7),
    "window of one": AttentionForm(0.25, window=1),
    "window of a block": AttentionForm(0.25, window=16),
    "wide window": AttentionForm(0.25, window=1000),
    "chunk": AttentionForm(0.25, chunk=12),
    "chunk of a block": AttentionForm(0.25, chunk=16),
    "softcap": AttentionForm(1.0, softcap=2.0),
    "softcap and window": AttentionForm(1.0, window=9, softcap=2.0),
    "softcap and chunk": AttentionForm(1.0, chunk=9, softcap=2.0),
    "window and chunk": AttentionForm(0.25, window=9, chunk=12),
}


def new_cpu(compiled: bool, num_threads: int = 1) -> CpuKernels:
    """Return the CPU version with its library, or as it is where that was not built."""
    return CpuKernels(built_native(num_threads) if compiled else None)


@pytest.fixture(params=[False, True], ids=["numba", "compiled"])
def kernels(request: pytest.FixtureRequest) -> CpuKernels:
    return new_cpu(request.param)


def by_definition(case: Case, form: AttentionForm, sinks: Tensor | None) -> Tensor:
    """Attend row by row, key by key, in float64, from the formula alone."""
    kv, rows = case.kv, case.rows
    group = case.q.shape[1] // kv.kv_heads
    out = torch.zeros(case.q.shape[0], case.q.shape[1], kv.v.shape[3], dtype=torch.float64)
    starts = rows.cu_seqlens_q.tolist()
    for seq, seq_len in enumerate(rows.seq_lens.tolist()):
        for row in range(starts[seq], starts[seq + 1]):
            position = seq_len - (starts[seq + 1] - row)
            first = max(0, position - form.window + 1) if form.window else 0
            first = max(first, position - position % form.chunk) if form.chunk else first
            for head in range(case.q.shape[1]):
                weights, values = [], []
                for key in range(first, position + 1):
                    block, offset = int(rows.block_tables[seq, key // kv.block_size]), key % kv.block_size
                    score = form.scaling * float(
                        case.q[row, head].double() @ kv.k[block, head // group, offset].double()
                    )
                    weights.append(form.softcap * math.tanh(score / form.softcap) if form.softcap else score)
                    values.append(kv.v[block, head // group, offset].double())
                powers = [math.exp(weight) for weight in weights]
                total = sum(powers) + (math.exp(float(sinks[head])) if sinks is not None else 0.0)
                out[row, head] = sum(power / total * value for power, value in zip(powers, values, strict=True))
    return out


def check(case: Case, form: AttentionForm, sinks: Tensor | None = None) -> None:
    expected = paged_attention_eager(case.q, case.kv, case.rows, form, sinks)
    limit = TOLERANCE[case.q.dtype]
    for compiled in (False, True):
        actual = new_cpu(compiled).paged_attention(case.q, case.kv, case.rows, form, sinks)
        assert actual.dtype == case.q.dtype
        torch.testing.assert_close(actual.float(), expected.float(), atol=limit, rtol=limit)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_eager_is_the_definition(form: AttentionForm, with_sinks: bool):
    case = new_case(Shape(v_dim=8, block_size=4), [(1, 1), (1, 9), (6, 13), (5, 5)])
    sinks = torch.linspace(-2, 2, 4) if with_sinks else None
    actual = paged_attention_eager(case.q, case.kv, case.rows, form, sinks)
    torch.testing.assert_close(actual.double(), by_definition(case, form, sinks), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("v_dim", [16, 24])
def test_cpu_equals_eager_for_every_form(form: AttentionForm, with_sinks: bool, v_dim: int):
    sinks = torch.linspace(-3, 3, 4) if with_sinks else None
    check(new_case(Shape(v_dim=v_dim), MIXED), form, sinks)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", ["plain", "window", "softcap"])
def test_cpu_equals_eager_in_every_dtype(dtype: torch.dtype, form: str):
    check(new_case(Shape(dtype=dtype, k_dim=64, v_dim=64), MIXED), FORMS[form], torch.linspace(-1, 1, 4).to(dtype))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_cpu_equals_eager_for_every_group(group: int, kv_heads: int):
    check(new_case(Shape(kv_heads=kv_heads, group=group), MIXED), FORMS["plain"])


@pytest.mark.parametrize("k_dim", [1, 8, 15, 16, 17, 64, 72, 80, 128, 256])
@pytest.mark.parametrize("v_dim", [8, 80, 128])
def test_cpu_equals_eager_for_every_width(k_dim: int, v_dim: int):
    check(new_case(Shape(k_dim=k_dim, v_dim=v_dim), MIXED), AttentionForm(k_dim**-0.5))


@pytest.mark.parametrize("block_size", [1, 2, 5, 16, 128])
def test_cpu_equals_eager_for_every_block_size(block_size: int):
    check(new_case(Shape(block_size=block_size), MIXED), FORMS["window and chunk"])


@pytest.mark.parametrize("seq_len", [1, 2, 15, 16, 17, 31, 32, 33, 511, 512, 513])
def test_cpu_equals_eager_at_block_edges(seq_len: int):
    check(new_case(Shape(), [(1, seq_len)]), FORMS["plain"])
    check(new_case(Shape(), [(seq_len, seq_len)]), FORMS["plain"])
    check(new_case(Shape(), [((seq_len + 1) // 2, seq_len)]), FORMS["window"])


def test_long_chunks_with_a_window_longer_than_a_masked_piece():
    check(new_case(Shape(), [(600, 900)]), AttentionForm(0.25, window=200))
    check(new_case(Shape(), [(600, 900)]), AttentionForm(0.25, chunk=250))


def test_large_scores_neither_overflow_nor_lose_the_sum():
    case = new_case(Shape(), MIXED)
    check(case, AttentionForm(400.0))
    check(case, AttentionForm(400.0), torch.full((4,), 50.0))


def test_a_query_in_any_memory_order_is_read_right(kernels: CpuKernels):
    case = new_case(Shape(), MIXED)
    turned = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert not turned.is_contiguous()
    actual = kernels.paged_attention(turned, case.kv, case.rows, FORMS["plain"], None)
    expected = kernels.paged_attention(case.q, case.kv, case.rows, FORMS["plain"], None)
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


def test_a_decode_row_is_the_same_alone_and_in_a_batch(kernels: CpuKernels):
    case = new_case(Shape(k_dim=64, v_dim=64), [(1, 100), (1, 7), (30, 30), (1, 333)])
    alone = new_case(Shape(k_dim=64, v_dim=64), [(1, 100)])
    alone.kv.k[alone.rows.block_tables[0, :7].long()] = case.kv.k[case.rows.block_tables[0, :7].long()]
    alone.kv.v[alone.rows.block_tables[0, :7].long()] = case.kv.v[case.rows.block_tables[0, :7].long()]
    batch = kernels.paged_attention(case.q, case.kv, case.rows, FORMS["plain"], None)
    single = kernels.paged_attention(case.q[:1], alone.kv, alone.rows, FORMS["plain"], None)
    assert torch.equal(batch[0], single[0])


@pytest.mark.parametrize("compiled", [False, True])
def test_threads_share_the_rows_and_change_nothing(compiled: bool):
    case = new_case(Shape(kv_heads=3), MIXED)
    single = new_cpu(compiled).paged_attention(case.q, case.kv, case.rows, FORMS["plain"], None)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared = new_cpu(compiled, 3).paged_attention(case.q, case.kv, case.rows, FORMS["plain"], None)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(shared, single, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_task_ranges_cover_every_task_once(num_threads: int):
    positions = torch.tensor([500, 0, 3, 3, 900, 1]).numpy()
    ranges = cpu._split(positions, 3, num_threads)
    assert [task for begin, end in ranges for task in range(begin, end)] == list(range(18))
    assert len(ranges) <= num_threads


@pytest.mark.parametrize(
    ("name", "value"), [("block_tables", -1), ("block_tables", 10_000), ("slot_mapping", 10**7), ("seq_lens", 400)]
)
def test_an_index_outside_the_pool_is_refused_before_memory_is_touched(name: str, value: int, kernels: CpuKernels):
    case = new_case(Shape(), [(1, 40), (3, 20)])
    getattr(case.rows, name).view(-1)[0] = value
    with pytest.raises(ValueError, match="block table"):
        kernels.paged_attention(case.q, case.kv, case.rows, FORMS["plain"], None)


@pytest.mark.parametrize("name", ["window", "chunk", "softcap"])
def test_a_form_refuses_widths_below_one(name: str):
    with pytest.raises(ValueError, match=name):
        AttentionForm(1.0, **{name: 0})

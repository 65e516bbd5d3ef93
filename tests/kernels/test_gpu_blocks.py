"""The Triton kernels that write and move KV: every element in its place, every other one untouched."""

import pytest
import torch

from kernels.copy_blocks import copy_blocks
from kernels.gpu import move_blocks
from kernels.gpu.kernels import TritonKernels
from kernels.staging import gather_blocks_eager, scatter_blocks_eager
from kernels.store_kv import store_kv_eager
from tests.kernels.cases import Shape, new_case
from tests.kernels.devices import moved, on_each_device

SHAPES = [
    Shape(),
    Shape(kv_heads=1, k_dim=1, v_dim=3, block_size=1),
    Shape(kv_heads=9, k_dim=24, v_dim=16, block_size=5, dtype=torch.float16),
    Shape(dtype=torch.bfloat16, k_dim=80, v_dim=64),
]


@on_each_device
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_go_where_the_eager_twin_puts_them(shape: Shape, device: str):
    case = new_case(shape, [(1, 1), (7, 20), (1, 17)])
    case.pool.fill_(7.0)
    case.rows.slot_mapping[::3] = -1
    k = torch.randn(len(case.q), shape.kv_heads, shape.k_dim).to(shape.dtype)
    v = torch.randn(len(case.q), shape.kv_heads, shape.v_dim).to(shape.dtype)
    there = moved(new_case(shape, [(1, 1), (7, 20), (1, 17)]), device)
    there.pool.fill_(7.0)
    there.rows.slot_mapping[::3] = -1
    store_kv_eager(k, v, case.kv, case.rows)
    TritonKernels(torch.device(device)).store_kv(k.to(device), v.to(device), there.kv, there.rows)
    assert torch.equal(there.pool.cpu(), case.pool)


@on_each_device
def test_states_in_any_memory_order_and_another_dtype(device: str):
    case = moved(new_case(Shape(dtype=torch.float16), [(9, 30)]), device)
    k, v = (torch.randn(2, 9, 16).transpose(0, 1).to(device) for _ in range(2))
    TritonKernels(torch.device(device)).store_kv(k, v.transpose(1, 2).contiguous().transpose(1, 2), case.kv, case.rows)
    blocks, offsets = case.rows.slot_mapping // 16, case.rows.slot_mapping % 16
    assert torch.equal(case.kv.k[blocks, :, offsets], k.half())
    assert torch.equal(case.kv.v[blocks, :, offsets], v.half())


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("width", [1, 3, 6, 4100])
def test_blocks_are_gathered_scattered_and_copied(width: int, dtype: torch.dtype, device: str):
    pool = torch.randint(0, 100, (9, width)).to(dtype).to(device)
    before = pool.clone()
    ids = torch.tensor([7, 0, 3], device=device)
    staging = torch.empty(3, width, dtype=dtype, device=device)
    move_blocks.gather_blocks(pool, ids, staging)
    expected = torch.empty_like(staging)
    gather_blocks_eager(pool, ids, expected)
    assert torch.equal(staging, expected)

    move_blocks.scatter_blocks(staging, pool, torch.tensor([1, 8, 7], device=device))
    scatter_blocks_eager(staging, before, torch.tensor([1, 8, 7], device=device))
    assert torch.equal(pool, before)

    move_blocks.copy_blocks(pool, torch.tensor([1, 2], device=device), torch.tensor([4, 5], device=device))
    copy_blocks(before, [1, 2], [4, 5])
    assert torch.equal(pool, before)


@on_each_device
def test_no_blocks_are_no_work(device: str):
    pool = torch.ones(2, 4, device=device)
    none = torch.empty(0, dtype=torch.int64, device=device)
    move_blocks.gather_blocks(pool, none, torch.empty(0, 4, device=device))
    move_blocks.copy_blocks(pool, none, none)
    assert torch.equal(pool.cpu(), torch.ones(2, 4))

"""Cache writes: every token in its slot, every other byte untouched."""

import pytest
import torch
from triton import knobs

from kernels.copy_blocks import copy_blocks
from kernels.layer_kv import LayerKV
from kernels.select import EagerKernels, choose_kernels
from tests.kernels.cases import Shape, new_case

CPU = torch.device("cpu")
SHAPES = [
    Shape(),
    Shape(kv_heads=1, k_dim=1, v_dim=3, block_size=1),
    Shape(k_dim=24, v_dim=16, block_size=5),
    Shape(dtype=torch.bfloat16),
    Shape(dtype=torch.float16, k_dim=80, v_dim=80),
]


@pytest.mark.parametrize("name", ["eager", "cpu"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_go_to_their_slots_and_nowhere_else(name: str, shape: Shape):
    case = new_case(shape, [(1, 1), (17, 40), (3, 16), (1, 17)])
    case.pool.fill_(7.0)
    slots = case.rows.slot_mapping
    slots[::3] = -1
    k = torch.randn(len(slots), shape.kv_heads, shape.k_dim).to(shape.dtype)
    v = torch.randn(len(slots), shape.kv_heads, shape.v_dim).to(shape.dtype)
    choose_kernels(CPU, name).store_kv(k, v, case.kv, case.rows)
    written = 0
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            block_id, offset = divmod(slot, shape.block_size)
            assert torch.equal(case.kv.k[block_id, :, offset], k[row])
            assert torch.equal(case.kv.v[block_id, :, offset], v[row])
            written += shape.kv_heads * (shape.k_dim + shape.v_dim)
    assert int((case.pool != 7.0).sum()) == written


@pytest.mark.parametrize("name", ["eager", "cpu"])
def test_states_in_any_memory_order_and_another_dtype(name: str):
    shape = Shape(dtype=torch.bfloat16)
    case = new_case(shape, [(9, 30)])
    k, v = (torch.randn(shape.kv_heads, 9, shape.k_dim).transpose(0, 1) for _ in range(2))
    choose_kernels(CPU, name).store_kv(k, v, case.kv, case.rows)
    blocks, offsets = case.rows.slot_mapping // 16, case.rows.slot_mapping % 16
    assert torch.equal(case.kv.k[blocks, :, offsets], k.bfloat16())
    assert torch.equal(case.kv.v[blocks, :, offsets], v.bfloat16())


def test_copies_read_before_they_write():
    pool = torch.arange(12.0).view(4, 3).clone()
    copy_blocks(pool, src=[0, 1, 2], dst=[1, 2, 0])
    assert pool[:, 0].tolist() == [6.0, 0.0, 3.0, 9.0]
    copy_blocks(pool, src=[], dst=[])
    assert pool[:, 0].tolist() == [6.0, 0.0, 3.0, 9.0]


@pytest.mark.parametrize(("src", "dst"), [([0], []), ([0, 1], [2, 2]), ([0], [4]), ([-1], [0])])
def test_copies_refuse_wrong_blocks(src: list[int], dst: list[int]):
    with pytest.raises(ValueError, match=r"destination|block ids"):
        copy_blocks(torch.zeros(4, 3), src, dst)


def test_a_layer_whose_blocks_are_not_contiguous_is_refused():
    good = torch.zeros(4, 2, 16, 8)
    with pytest.raises(ValueError, match="contiguous"):
        LayerKV(good, good.transpose(1, 2))
    with pytest.raises(ValueError, match="last width"):
        LayerKV(good, torch.zeros(5, 2, 16, 8))


def test_kernels_are_chosen_by_device_and_name():
    assert choose_kernels(CPU).name == "cpu"
    assert choose_kernels(torch.device("meta")).name == "eager"
    assert isinstance(choose_kernels(CPU, "eager"), EagerKernels)
    with pytest.raises(ValueError, match="no kernels called 'fast'"):
        choose_kernels(CPU, "fast")
    with pytest.raises(ValueError, match="cannot run on cuda"):
        choose_kernels(torch.device("cuda"), "cpu")


@pytest.mark.skipif(not knobs.runtime.interpret, reason="TRITON_INTERPRET is not set")
def test_triton_kernels_run_on_a_gpu_and_in_the_interpreter(monkeypatch: pytest.MonkeyPatch):
    assert choose_kernels(torch.device("cuda")).name == "triton"
    assert choose_kernels(CPU, "triton").name == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="cannot run on cpu, but for TRITON_INTERPRET=1"):
        choose_kernels(CPU, "triton")

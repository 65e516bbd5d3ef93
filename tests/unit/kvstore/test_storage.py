"""Block memory: views for kernels, bytes for transfers, on one tensor."""

import os

import numpy as np
import pytest
import torch

from common.ids import BlockId
from common.model.spec import LayerSpec
from kvstore.layout import KvLayout
from kvstore.storage import KvStorage

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
    ),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYERS = (LayerSpec(2, 3, 5), LayerSpec(1, 7, 2))
BLOCK = 4


def new_storage(dtype: torch.dtype = torch.float32, num_blocks: int = 6, device: str = "cpu") -> KvStorage:
    return KvStorage(KvLayout(LAYERS, BLOCK, dtype), num_blocks, torch.device(device))


def ids(*numbers: int) -> list[BlockId]:
    return [BlockId(number) for number in numbers]


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_see_their_own_part_of_each_block(dtype: torch.dtype):
    storage = new_storage(dtype)
    views = storage.layer_views()
    for number, (view, layer) in enumerate(zip(views, LAYERS, strict=True)):
        assert view.k.shape == (6, layer.kv_heads, BLOCK, layer.k_dim)
        assert view.v.shape == (6, layer.kv_heads, BLOCK, layer.v_dim)
        view.k.fill_(2 * number + 1)
        view.v.fill_(2 * number + 2)
    block = torch.frombuffer(bytearray(storage.read(ids(3))), dtype=dtype)
    assert block.tolist() == [1.0] * 24 + [2.0] * 40 + [3.0] * 28 + [4.0] * 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_written_and_read_in_the_given_order(dtype: torch.dtype, device: str):
    storage = new_storage(dtype, device=device)
    size = storage.layout.block_bytes
    payload = os.urandom(3 * size)
    storage.write(ids(4, 0, 2), memoryview(payload))
    assert storage.read(ids(4, 0, 2)) == payload
    assert storage.read(ids(2, 4)) == payload[2 * size :] + payload[:size]
    assert storage.read(ids(1, 3, 5)) == bytes(3 * size)
    assert b"".join(storage.parts(ids(0))) == payload[size : 2 * size]


@pytest.mark.parametrize("device", DEVICES)
def test_a_written_block_is_what_the_layers_see(device: str):
    source, target = new_storage(device=device), new_storage(device=device)
    for view in source.layer_views():
        view.k.normal_()
        view.v.normal_()
    target.write(ids(1), memoryview(source.read(ids(5))))
    for ours, theirs in zip(target.layer_views(), source.layer_views(), strict=True):
        assert torch.equal(ours.k[1], theirs.k[5])
        assert torch.equal(ours.v[1], theirs.v[5])


def test_copy_moves_one_block_and_nothing_else():
    storage = new_storage()
    size = storage.layout.block_bytes
    payload = os.urandom(2 * size)
    storage.write(ids(1, 2), memoryview(payload))
    storage.copy(BlockId(1), BlockId(5))
    assert storage.read(ids(1, 2)) == payload
    assert storage.read(ids(5)) == payload[:size]
    assert storage.read(ids(0, 3, 4)) == bytes(3 * size)


def test_payloads_of_another_size_and_unknown_blocks_are_refused():
    storage = new_storage()
    size = storage.layout.block_bytes
    with pytest.raises(ValueError, match="2 blocks take"):
        storage.write(ids(0, 1), memoryview(bytes(size)))
    for block_id in (-1, 6):
        with pytest.raises(ValueError, match="does not exist"):
            storage.write(ids(block_id), memoryview(bytes(size)))
        with pytest.raises(ValueError, match="does not exist"):
            storage.read(ids(block_id))
        with pytest.raises(ValueError, match="does not exist"):
            storage.copy(BlockId(0), BlockId(block_id))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_on_a_gpu_move_as_the_same_bytes(dtype: torch.dtype):
    layout = KvLayout(LAYERS, BLOCK, dtype)
    storage = KvStorage(layout, 6, torch.device("cuda"))
    payload = os.urandom(3 * layout.block_bytes)
    storage.write(ids(4, 0, 2), memoryview(payload))
    assert storage.read(ids(4, 0, 2)) == payload
    storage.copy(BlockId(4), BlockId(1))
    assert storage.read(ids(1)) == payload[: layout.block_bytes]


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_are_filled_from_memory_on_the_same_device(device: str):
    storage = new_storage(device=device)
    size = storage.layout.block_bytes
    payload = os.urandom(2 * size)
    landed = torch.frombuffer(bytearray(payload), dtype=torch.uint8).reshape(2, size).to(device)
    assert bytes(storage.host_bytes(landed)) == payload
    storage.scatter(landed, ids(5, 1))
    assert storage.read(ids(5, 1)) == payload
    assert storage.read(ids(0, 2, 3, 4)) == bytes(4 * size)


def test_blocks_are_filled_each_from_a_row_of_its_own():
    source, target = new_storage(), new_storage()
    source.write(ids(*range(6)), memoryview(os.urandom(6 * source.layout.block_bytes)))
    target.gather(ids(0, 4), source.blocks.numpy(), (3, 3))
    assert target.read(ids(0, 4)) == source.read(ids(3, 3))
    with pytest.raises(ValueError, match="block 6 does not exist"):
        target.gather(ids(6), source.blocks.numpy(), (0,))


def test_blocks_may_lie_in_memory_that_is_given():
    layout = KvLayout(LAYERS, BLOCK, torch.float32)
    memory = np.zeros((6, layout.block_bytes), dtype=np.uint8)
    storage = KvStorage(layout, 6, torch.device("cpu"), memory=memory)
    storage.layer_views()[1].v[2].fill_(1.0)
    assert memory[2].any()
    assert not np.delete(memory, 2, axis=0).any()

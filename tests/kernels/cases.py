"""Random steps for kernel tests: a paged pool with strided layers, shuffled tables, and packed rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one attention layer."""

    kv_heads: int = 2
    group: int = 2
    k_dim: int = 16
    v_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One step on one layer of a pool that holds another layer beside it."""

    q: Tensor
    kv: LayerKV
    rows: PackedRows
    pool: Tensor


def new_case(shape: Shape, sequences: Sequence[tuple[int, int]], seed: int = 0) -> Case:
    """Return a step of ``sequences``, each (queries, keys); blocks that no sequence holds are NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-keys // shape.block_size) for _, keys in sequences]
    num_blocks = sum(needed) + 3
    kv, pool = new_layer(shape, num_blocks)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(sequences), max(needed) + 1), -1, dtype=torch.int32)
    slots = []
    for index, (num_queries, num_keys) in enumerate(sequences):
        block_ids = [order.pop() for _ in range(needed[index])]
        tables[index, : len(block_ids)] = torch.tensor(block_ids)
        all_slots = [
            block_ids[p // shape.block_size] * shape.block_size + p % shape.block_size for p in range(num_keys)
        ]
        slots += all_slots[num_keys - num_queries :]
        for block_id, offset in (divmod(slot, shape.block_size) for slot in all_slots):
            kv.k[block_id, :, offset] = torch.randn(shape.kv_heads, shape.k_dim, generator=generator)
            kv.v[block_id, :, offset] = torch.randn(shape.kv_heads, shape.v_dim, generator=generator)
    starts = torch.tensor([0, *(queries for queries, _ in sequences)]).cumsum(0)
    rows = PackedRows(
        cu_seqlens_q=starts.int(),
        seq_lens=torch.tensor([keys for _, keys in sequences], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
    )
    q = torch.randn(len(slots), shape.kv_heads * shape.group, shape.k_dim, generator=generator)
    return Case(q.to(shape.dtype), kv, rows, pool)


def new_layer(shape: Shape, num_blocks: int) -> tuple[LayerKV, Tensor]:
    """Return the second of three layers of a pool of NaN, and the pool ``[num_blocks, block_elements]``."""
    sizes = [shape.kv_heads * shape.block_size * dim for dim in (shape.k_dim, shape.v_dim)]
    pool = torch.full((num_blocks, 3 * sum(sizes)), float("nan"), dtype=shape.dtype)

    def view(offset: int, dim: int) -> Tensor:
        strides = (pool.shape[1], shape.block_size * dim, dim, 1)
        return pool.as_strided((num_blocks, shape.kv_heads, shape.block_size, dim), strides, offset)

    return LayerKV(view(sum(sizes), shape.k_dim), view(sum(sizes) + sizes[0], shape.v_dim)), pool

"""Write the keys and values of one step into their slots: ``pool[slot_mapping[t]] = kv[t]``, -1 is skipped."""

from torch import Tensor

from kernels.layer_kv import LayerKV
from kernels.packed_rows import PackedRows


def store_kv_eager(k: Tensor, v: Tensor, kv: LayerKV, rows: PackedRows) -> None:
    """Store ``k [T, kv_heads, k_dim]`` and ``v [T, kv_heads, v_dim]``; the reference of every other version."""
    wanted = rows.slot_mapping >= 0
    slots = rows.slot_mapping[wanted]
    block_ids, offsets = slots // kv.block_size, slots % kv.block_size
    kv.k[block_ids, :, offsets] = k[wanted].to(kv.k.dtype)
    kv.v[block_ids, :, offsets] = v[wanted].to(kv.v.dtype)

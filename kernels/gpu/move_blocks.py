"""Whole blocks from place to place: inside the pool, and between the pool and contiguous staging memory.

``target[target_ids[i]] = source[source_ids[i]]``, where missing ids mean i. Bytes move as the widest words that a block
divides into. Grid ``[blocks, pieces of a block]``. All programs run at once, so no block may be both read and written.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_PIECE = 2048
"""Words that one program moves."""

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


@triton.jit
def _move_blocks_kernel(
    target,  # [blocks, words]
    source,  # [blocks, words]
    target_ids,  # [n] int64, unused without HAS_TARGET_IDS
    source_ids,  # [n] int64, unused without HAS_SOURCE_IDS
    stride_target,
    stride_source,
    words,
    HAS_TARGET_IDS: tl.constexpr,
    HAS_SOURCE_IDS: tl.constexpr,
    PIECE: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    to_block = index
    if HAS_TARGET_IDS:
        to_block = tl.load(target_ids + index)
    from_block = index
    if HAS_SOURCE_IDS:
        from_block = tl.load(source_ids + index)
    word = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    moved = tl.load(source + from_block * stride_source + word, mask=word < words)
    tl.store(target + to_block * stride_target + word, moved, mask=word < words)


def copy_blocks(pool: Tensor, src: Tensor, dst: Tensor) -> None:
    """``pool[dst[i]] = pool[src[i]]`` for ``pool [num_blocks, block_elements]``; no block may be in both lists."""
    _move(pool, pool, dst, src, len(src))


def gather_blocks(pool: Tensor, block_ids: Tensor, staging: Tensor) -> None:
    """``staging[i] = pool[block_ids[i]]``; ``staging [n, block_elements]``, ``block_ids [n]`` int64."""
    _move(staging, pool, None, block_ids, len(block_ids))


def scatter_blocks(staging: Tensor, pool: Tensor, block_ids: Tensor) -> None:
    """``pool[block_ids[i]] = staging[i]``; no block may be named twice."""
    _move(pool, staging, block_ids, None, len(block_ids))


def _move(
    target: Tensor, source: Tensor, target_ids: Tensor | None, source_ids: Tensor | None, num_blocks: int
) -> None:
    if num_blocks == 0:
        return
    target, source = _as_words(target), _as_words(source)
    words = target.shape[1]
    piece = min(_PIECE, triton.next_power_of_2(words))
    _move_blocks_kernel[(num_blocks, triton.cdiv(words, piece))](
        target,
        source,
        target if target_ids is None else target_ids,
        source if source_ids is None else source_ids,
        target.stride(0),
        source.stride(0),
        words,
        HAS_TARGET_IDS=target_ids is not None,
        HAS_SOURCE_IDS=source_ids is not None,
        PIECE=piece,
        num_warps=4,
    )


def _as_words(blocks: Tensor) -> Tensor:
    """Return ``[blocks, block_elements]`` as the widest integers that divide a block."""
    block_bytes = blocks.shape[1] * blocks.element_size()
    return blocks.view(next(dtype for width, dtype in _WORDS if block_bytes % width == 0))

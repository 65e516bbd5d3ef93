"""The inner loop that both attention kernels share: one tile of query rows over a range of paged keys.

Online softmax (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022, algorithm 1) in base 2: a row keeps the
largest score so far ``m``, the sum of ``2 ** (score - m)`` and the weighted values. Sums are float32; the products take
the dtype of the pool; float32 is multiplied as three products of its halves, close to full precision.

A row of the tile is one query under one query head; the heads that share keys lie in one tile, so keys and values are
read once for all of them.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""The interpreter takes the bits of bfloat16 for integers when it multiplies matrices, so it gets float32."""


@triton.jit
def product(a, b, acc):
    """Return ``a @ b + acc`` with float32 sums; "tf32x3" says nothing about 16-bit types."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def first_key(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first position that a query at ``position`` (scalar or tile) sees; 0 means no window, no chunk."""
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def load_rows(
    pool,  # one kv head's rows of block 0
    stride_block,  # elements from block to block
    block_ids,  # [N] int64
    offsets,  # [N] token in the block
    inside,  # [N] bool
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return ``[N, DIM_PAD]`` keys or values, 0 where there are none."""
    columns = tl.arange(0, DIM_PAD)
    pointers = pool + (block_ids * stride_block + offsets * DIM)[:, None] + columns[None, :]
    if MASKED:
        return tl.load(pointers, mask=inside[:, None] & (columns < DIM)[None, :], other=0.0)
    if DIM < DIM_PAD:
        return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def attend_keys(
    q,  # [M, K_PAD]
    acc,  # [M, V_PAD] float32
    m,  # [M] float32
    total,  # [M] float32
    begin,  # first key
    end,  # one past the last key
    positions,  # [M] position of each row's query
    table,  # the sequence's block ids
    k,  # the kv head's keys in block 0
    v,  # the kv head's values in block 0
    stride_k,
    stride_v,
    scaling,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PAD: tl.constexpr,
    V_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return acc, m and total after the keys ``begin`` to ``end``.

    Without MASKED every row must see every key, and their number be a multiple of BLOCK_N.
    """
    for start in range(begin, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < end
        if MASKED:
            block_ids = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block_ids = tl.load(table + keys // BLOCK_SIZE).to(tl.int64)
        offsets = keys % BLOCK_SIZE
        k_tile = load_rows(k, stride_k, block_ids, offsets, inside, K_DIM, K_PAD, MASKED)
        scores = product(q, tl.trans(k_tile), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if SOFTCAP > 0:
            doubled = scores * (scaling * 2.0 / SOFTCAP)
            scores = (SOFTCAP * LOG2_E) * (1.0 - 2.0 / (tl.exp(doubled) + 1.0))  # tanh
        else:
            scores = scores * (scaling * LOG2_E)
        if MASKED:
            visible = (keys[None, :] <= positions[:, None]) & inside[None, :]
            if WINDOW > 0 or CHUNK > 0:
                visible = visible & (keys[None, :] >= first_key(positions, WINDOW, CHUNK)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        base = new_m
        if MASKED:
            base = tl.where(new_m == float("-inf"), 0.0, new_m)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(m - base)
        total = total * shrink + tl.sum(weights, 1)
        v_tile = load_rows(v, stride_v, block_ids, offsets, inside, V_DIM, V_PAD, MASKED)
        acc = product(weights.to(v_tile.dtype), v_tile, acc * shrink[:, None])
        m = new_m
    return acc, m, total

"""Attention of single query rows over paged keys and values: the decode kernel of the CPU.

A task is one (row, kv head): its group of query heads shares every key and value that is read. Two passes over the
visible keys: all scores, then the weighted values; softmax between them in float32. Keys and values of 16 bits are
widened a block at a time into scratch that stays in the first cache.
"""

import numpy as np

from kernels.cpu.compile import compiled
from kernels.cpu.vector import (
    LANES,
    float_of_bits,
    fma,
    lane_sum,
    load,
    load_one,
    prefetch,
    splat,
    store,
    store_lane_sums,
)

_ZERO = np.float32(0)
_ONE = np.float32(1)
_TWO = np.float32(2)
_LOWEST = np.float32(-3.0e38)
_LINE_BYTES = 64
_FLOAT_BYTES = 4


@compiled
def attend_rows(
    out,  # [N, q_heads * v_dim] float32, written
    q,  # [T * q_heads * k_dim] float32, or 16 bits
    k,  # every element of the pool from this layer's first key on
    v,  # every element of the pool from this layer's first value on
    k_stride,  # elements from one block of k to the next, v_stride likewise
    v_stride,
    k_dim,
    v_dim,
    q_heads,
    kv_heads,
    block_size,
    block_tables,  # [S, max_blocks] int32
    row_ids,  # [N] which rows of q to attend with
    sequences,  # [N] the sequence of each
    positions,  # [N] the position of each
    scaling,
    window,  # 0 is off; so it is for chunk and softcap
    chunk,
    softcap,
    sinks,  # [q_heads] float32, or empty
    begin,
    end,
):
    """Compute tasks ``begin`` to ``end`` of N * kv_heads; task t is row ``t // kv_heads``, head ``t % kv_heads``."""
    group = q_heads // kv_heads
    longest = 0
    for task in range(begin, end):
        longest = max(longest, positions[task // kv_heads] + 1)
    width = -(-longest // block_size) * block_size  # scores a query head
    queries = np.empty(group * k_dim, np.float32)
    scores = np.empty(group * width, np.float32)
    sums = np.empty(group * v_dim, np.float32)
    wide = np.empty(block_size * max(k_dim, v_dim), np.float32)
    has_sinks = sinks.shape[0] > 0
    for task in range(begin, end):
        row, head = task // kv_heads, task % kv_heads
        position = positions[row]
        table = block_tables[sequences[row]]
        first = 0
        if window > 0:
            first = max(first, position - window + 1)
        if chunk > 0:
            first = max(first, position // chunk * chunk)
        source = (row_ids[row] * q_heads + head * group) * k_dim
        for index in range(group * k_dim):
            queries[index] = load_one(q, source + index) * scaling
        _score(
            scores,
            width,
            queries,
            group,
            k,
            wide,
            k_stride,
            head * block_size * k_dim,
            k_dim,
            block_size,
            table,
            first,
            position + 1,
        )
        for member in range(group):
            visible = scores[member * width + first : member * width + position + 1]
            if softcap > 0:
                _cap(visible, softcap)
            _softmax(visible, has_sinks, sinks[head * group + member] if has_sinks else _ZERO)
        sums[:] = _ZERO
        _weigh(
            sums,
            scores,
            width,
            group,
            v,
            wide,
            v_stride,
            head * block_size * v_dim,
            v_dim,
            block_size,
            table,
            first,
            position + 1,
        )
        target = head * group * v_dim
        for index in range(group * v_dim):
            out[row, target + index] = sums[index]


@compiled
def _score(scores, width, queries, group, k, wide, stride, offset, dim, block_size, table, first, stop):
    """Write ``query . key`` of each query head of the group and each key from ``first`` to ``stop``."""
    for block in range(first // block_size, -(-stop // block_size)):
        base = np.int64(table[block]) * stride + offset
        if (block + 1) * block_size < stop:
            _prefetch(k, np.int64(table[block + 1]) * stride + offset, block_size * dim)
        low = max(first - block * block_size, 0)
        high = min(stop - block * block_size, block_size)
        if k.itemsize == _FLOAT_BYTES:
            _score_block(scores, block * block_size, width, queries, group, k, base, dim, low, high)
        else:
            _widen(wide, k, base, block_size * dim)
            _score_block(scores, block * block_size, width, queries, group, wide, 0, dim, low, high)


@compiled
def _score_block(scores, position, width, queries, group, keys, base, dim, low, high):
    """Write the scores of keys ``low`` to ``high`` of the block that begins at ``position``, four keys at a time."""
    whole = dim // LANES * LANES
    for member in range(group):
        query, target = member * dim, member * width + position
        key = low
        while key + 4 <= high:
            place = base + key * dim
            a = b = c = d = splat(_ZERO)
            for lane in range(0, whole, LANES):
                part = load(queries, query + lane)
                a = fma(part, load(keys, place + lane), a)
                b = fma(part, load(keys, place + dim + lane), b)
                c = fma(part, load(keys, place + 2 * dim + lane), c)
                d = fma(part, load(keys, place + 3 * dim + lane), d)
            store_lane_sums(scores, target + key, a, b, c, d)
            key += 4
        while key < high:
            a = splat(_ZERO)
            for lane in range(0, whole, LANES):
                a = fma(load(queries, query + lane), load(keys, base + key * dim + lane), a)
            scores[target + key] = lane_sum(a)
            key += 1
        for key in range(low, high):
            for rest in range(whole, dim):
                scores[target + key] += queries[query + rest] * load_one(keys, base + key * dim + rest)


@compiled
def _weigh(sums, weights, width, group, v, wide, stride, offset, dim, block_size, table, first, stop):
    """Add ``weight * value`` of each key from ``first`` to ``stop`` to the sums of each query head of the group."""
    for block in range(first // block_size, -(-stop // block_size)):
        base = np.int64(table[block]) * stride + offset
        if (block + 1) * block_size < stop:
            _prefetch(v, np.int64(table[block + 1]) * stride + offset, block_size * dim)
        low = max(first - block * block_size, 0)
        high = min(stop - block * block_size, block_size)
        if v.itemsize == _FLOAT_BYTES:
            _weigh_block(sums, weights, block * block_size, width, group, v, base, dim, low, high)
        else:
            _widen(wide, v, base, block_size * dim)
            _weigh_block(sums, weights, block * block_size, width, group, wide, 0, dim, low, high)


@compiled
def _weigh_block(sums, weights, position, width, group, values, base, dim, low, high):
    """Add the weighted values of keys ``low`` to ``high`` of the block that begins at ``position``."""
    whole = dim // LANES * LANES
    for member in range(group):
        source, target = member * width + position, member * dim
        lane = 0
        while lane + 4 * LANES <= whole:
            a, b = load(sums, target + lane), load(sums, target + lane + LANES)
            c, d = load(sums, target + lane + 2 * LANES), load(sums, target + lane + 3 * LANES)
            for key in range(low, high):
                weight, place = splat(load_one(weights, source + key)), base + key * dim + lane
                a = fma(weight, load(values, place), a)
                b = fma(weight, load(values, place + LANES), b)
                c = fma(weight, load(values, place + 2 * LANES), c)
                d = fma(weight, load(values, place + 3 * LANES), d)
            store(sums, target + lane, a)
            store(sums, target + lane + LANES, b)
            store(sums, target + lane + 2 * LANES, c)
            store(sums, target + lane + 3 * LANES, d)
            lane += 4 * LANES
        while lane + LANES <= whole:
            a = load(sums, target + lane)
            for key in range(low, high):
                a = fma(splat(load_one(weights, source + key)), load(values, base + key * dim + lane), a)
            store(sums, target + lane, a)
            lane += LANES
        for rest in range(whole, dim):
            for key in range(low, high):
                sums[target + rest] += load_one(weights, source + key) * load_one(values, base + key * dim + rest)


@compiled
def _softmax(scores, has_sink, sink):
    """Turn ``scores [keys]`` into weights; a sink takes its share of the sum."""
    highest = sink if has_sink else _LOWEST
    for key in range(scores.shape[0]):
        highest = max(highest, scores[key])
    total = _exp(sink - highest) if has_sink else _ZERO
    for key in range(scores.shape[0]):
        weight = _exp(scores[key] - highest)
        scores[key] = weight
        total += weight
    share = _ONE / total
    for key in range(scores.shape[0]):
        scores[key] *= share


@compiled
def _cap(scores, softcap):
    """Squash ``scores [keys]`` to the open interval of plus and minus ``softcap`` by a hyperbolic tangent."""
    for key in range(scores.shape[0]):
        power = _exp(min(_TWO * scores[key] / softcap, np.float32(80)))
        scores[key] = softcap * (_ONE - _TWO / (power + _ONE))


@compiled
def _exp(x):
    """Return e**x for x up to 88, to two units in the last place; below -87 as at -87.

    ``x = n ln 2 + r`` with ``|r| <= ln 2 / 2``; e**r by the polynomial of the Cephes library (``expf``), times 2**n
    made of bits. Without branches, so that loops over it vectorise.
    """
    x = max(x, np.float32(-87))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    power = np.float32(1.9875691500e-4)
    power = power * r + np.float32(1.3981999507e-3)
    power = power * r + np.float32(8.3334519073e-3)
    power = power * r + np.float32(4.1665795894e-2)
    power = power * r + np.float32(1.6666665459e-1)
    power = power * r + np.float32(5.0000001201e-1)
    power = power * r * r + r + _ONE
    return power * float_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))


@compiled
def _widen(wide, source, base, count):
    """Copy ``count`` elements from ``base`` on to float32 scratch."""
    whole = count // LANES * LANES
    for index in range(0, whole, LANES):
        store(wide, index, load(source, base + index))
    for index in range(whole, count):
        wide[index] = load_one(source, base + index)


@compiled
def _prefetch(source, base, count):
    """Ask for ``count`` elements from ``base`` on."""
    step = _LINE_BYTES // source.itemsize
    for index in range(0, count, step):
        prefetch(source, base + index)

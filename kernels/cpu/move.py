"""Element moves between packed rows and blocks on the CPU.

Bits are moved as they are, so any 16- or 32-bit type will do.
"""

import numpy as np

from kernels.cpu.compile import compiled


@compiled
def store_rows(pool, stride, block_size, slots, rows, heads, dim):
    """Write ``rows [T * heads * dim]`` to their slots ``[T]`` of a layer's keys or values; slot -1 is skipped."""
    for row in range(slots.shape[0]):
        slot = slots[row]
        if slot < 0:
            continue
        base = slot // block_size * stride + slot % block_size * dim
        for head in range(heads):
            source = rows[(row * heads + head) * dim :][:dim]
            target = pool[base + head * block_size * dim :][:dim]
            for index in range(dim):
                target[index] = source[index]


@compiled
def gather_keys(out, pool, stride, block_size, table, first, heads, dim):
    """Copy the keys or values from position ``first`` on into ``out [heads * keys * dim]``, one head after another."""
    keys = out.shape[0] // (heads * dim)
    for head in range(heads):
        position = first
        while position < first + keys:
            offset = position % block_size
            count = min(block_size - offset, first + keys - position)
            base = np.int64(table[position // block_size]) * stride + (head * block_size + offset) * dim
            source = pool[base : base + count * dim]
            target = out[(head * keys + position - first) * dim :][: count * dim]
            for index in range(count * dim):
                target[index] = source[index]
            position += count

"""Who computes a matrix product on the CPU: our compiled kernel, or torch's library.

Few rows are bound by reading the weights, which ours does at the speed of memory and torch's does not. Many rows are
bound by arithmetic. Ours is the faster one there too where the processor has the instructions that it is written for
(AVX512-BF16); a processor that multiplies whole tiles of bfloat16 (AMX) does so through torch. The numbers come from
``python -m benchmarks.products``, see docs/performance.md.
"""

ALWAYS = 1 << 30
FEW = 128
"""Rows from which on ours, in bfloat16, goes another way: MOST_FEW_ROWS of ``native/product.h``."""

_LARGEST: dict[str, tuple[int, int]] = {  # rows in float32, in bfloat16
    "avx512_bf16": (ALWAYS, ALWAYS),
    "avx512": (ALWAYS, 8),
    "avx2": (32, 4),
    "portable": (8, 1),
}


def largest_rows(level: str, has_tile_products: bool, *, is_bfloat16: bool) -> int:
    """Return up to how many rows our kernel is the faster one at an instruction-set ``level``."""
    largest = _LARGEST[level][is_bfloat16]
    return min(largest, FEW) if is_bfloat16 and has_tile_products else largest

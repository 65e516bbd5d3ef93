"""Who computes a matrix product on the CPU: our compiled kernel, or torch's library.

Few rows are bound by reading the weights, which ours does at the speed of memory and torch's does not. Many rows are
bound by arithmetic. In bfloat16 torch's library (oneDNN) then wins; in float32 (MKL) it did not on the one processor
with AVX-512 that was measured (AMD, Zen 5). The numbers come from ``python -m benchmarks.products``, see
docs/performance.md.
"""

ALWAYS = 1 << 30

_LARGEST: dict[str, tuple[int, int]] = {  # rows in float32, in bfloat16
    "avx512_bf16": (ALWAYS, 128),
    "avx512": (ALWAYS, 8),
    "avx2": (32, 4),
    "portable": (8, 1),
}


def largest_rows(level: str, *, is_bfloat16: bool) -> int:
    """Return up to how many rows our kernel is the faster one at an instruction-set ``level``."""
    return _LARGEST[level][is_bfloat16]

"""The compiled CPU kernels for tests, built first where an install has not done it."""

from functools import lru_cache

from kernels.cpu.native.build import LIBRARY, build
from kernels.cpu.native.operations import Native, new_native


@lru_cache(maxsize=4)
def built_native(num_threads: int = 1) -> Native | None:
    """Return the compiled operations, or None on a machine without a C compiler."""
    if not LIBRARY.exists():
        build()
    return new_native(num_threads)

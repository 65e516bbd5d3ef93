"""Has the system give memory before it is written to.

Memory that was asked for is given page by page, with the first write to each: a fault, and a page full of zeros. Who
writes much of it for the first time, as a prompt does to its blocks, waits for that.
"""

import ctypes
import mmap
import sys
from functools import lru_cache
from typing import Any

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14, which Python has no name for."""


def populate(address: int, num_bytes: int) -> bool:
    """Have all pages from ``address`` on given for writing, and leave what is in them; return whether they are.

    Elsewhere than on such a Linux, or when memory is short, they are given with the first write as always.
    """
    madvise = _madvise()
    if madvise is None:
        return False
    begin = address - address % mmap.PAGESIZE
    return bool(madvise(begin, address + num_bytes - begin, _MADV_POPULATE_WRITE) == 0)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    """Return the system's function, which runs without Python's lock; the one of ``mmap`` keeps it."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return madvise

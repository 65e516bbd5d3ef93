"""Memory in huge pages, where the system has them.

Weights are read from end to end in every step. With pages of 4 KiB, looking each page up costs a part of the speed.
"""

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
_LINE_BYTES = 64


def empty_in_huge_pages(num_bytes: int) -> Tensor:
    """Return ``[num_bytes]`` uint8, zeros, at the beginning of a huge page if the system has such.

    Memory is taken as it is written to, the last page whole.
    """
    region = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        region.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(region, dtype=torch.uint8)  # keeps the region
    begin = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[begin : begin + num_bytes]


def gather_in_huge_pages(parameters: Sequence[Tensor]) -> None:
    """Move the data of ``parameters`` behind each other, in their order; the memory they had before is given back."""
    ends = [0]
    for parameter in parameters:
        ends.append(ends[-1] + -(-parameter.nbytes // _LINE_BYTES) * _LINE_BYTES)
    region = empty_in_huge_pages(ends[-1])
    for parameter, begin in zip(parameters, ends, strict=False):
        data = region[begin : begin + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        parameter.data = data.copy_(parameter.data)

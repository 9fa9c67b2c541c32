"""Large new tensors on huge pages, which the operating system clears faster when they are first written.

Linux clears each page of new memory at the first write: 4 KiB at a time, unless huge pages (2 MiB) are requested for
the memory. On an AMD EPYC of 2024, two threads fill 38 MiB of new memory in 8.9 ms, and on huge pages in 2.0 ms.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

from torch import Tensor

LARGE = 2**25  # bytes; smaller tensors are usually in memory that the allocator has kept, which was cleared before
_PAGE = 2**21
_HUGE = 14  # MADV_HUGEPAGE


@functools.cache
def _function() -> Callable[[int, int, int], int] | None:
    """Return `madvise` of the C library; None on systems other than Linux."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return madvise


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Request huge pages for the memory of a new tensor on the CPU if it is large, and return the tensor."""
    if tensor.nbytes >= LARGE and (madvise := _function()) is not None:
        first = -(-tensor.data_ptr() // _PAGE) * _PAGE
        stop = (tensor.data_ptr() + tensor.nbytes) // _PAGE * _PAGE
        madvise(first, stop - first, _HUGE)  # a refusal, such as by a kernel without huge pages, changes no result
    return tensor

"""Settings of the C library's allocator: whether freed memory stays with the process or returns to the system.

Memory that returns is cleared and mapped page by page when it is allocated again. For the tensors of a training
step on a CPU, clearing and mapping take as long as several copies of the tensors. glibc returns two kinds of
freed memory: blocks that are larger than a first threshold, and the end of its heap when that end is larger
than a second threshold. Both thresholds start at 128 KiB and grow with freed blocks, up to 32 and 64 MiB. If a
program sets one of the thresholds, neither of them grows any more.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

# The user's settings of the thresholds (mallopt(3)). Below are the numbers of the thresholds in malloc.h.
_VARIABLES: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
_MMAP_THRESHOLD: Final = -3
_TRIM_THRESHOLD: Final = -1
# All sizes are in bytes. torch puts blocks of this size and more on huge pages, which cause few page faults.
_LARGE: Final = 2 << 20
_LARGEST: Final = 32 << 20
_END_OF_HEAP: Final = 64 << 20

_gives_back = False


def give_back_freed_memory() -> None:
    """Return freed blocks of 2 MiB and more to the system from now on, and return memory that is free now.

    Otherwise tensors of a few MiB that are allocated and freed leave hundreds of MiB of unused memory. The
    reason is that aligned blocks seldom fit into the holes of freed blocks. This memory would cancel the
    savings of offload and of gathering parameters. The end of the heap, with the smaller blocks, stays up to 64
    MiB.

    This function works only with glibc. It does nothing if the user has set a threshold.
    """
    global _gives_back
    _gives_back = True
    if _set(_LARGE):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory(largest: int = _LARGEST) -> None:
    """Keep freed blocks of up to ``largest`` bytes, and 64 MiB at the end of the heap.

    The default is 32 MiB, the value that the threshold of glibc finally reaches.

    This function works only with glibc. It does nothing if the user has set a threshold, or after
    :func:`give_back_freed_memory` was called.
    """
    if not _gives_back:
        _set(largest)


def _set(mmap_threshold: int) -> bool:
    """Set both thresholds. Return False if this is not possible, or if the user has set a threshold."""
    if any(name in os.environ for name in _VARIABLES):
        return False
    library = ctypes.CDLL(None)
    try:
        library.mallopt(_MMAP_THRESHOLD, mmap_threshold)
        library.mallopt(_TRIM_THRESHOLD, _END_OF_HEAP)
    except AttributeError:
        return False
    return True

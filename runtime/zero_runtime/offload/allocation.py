"""Settings of the C library's allocator, so that freed memory returns to the system.

glibc returns a freed block to the system only if it was larger than a threshold, which grows with freed sizes up to 32 MiB.
Smaller blocks stay, and aligned blocks seldom fit into the holes of freed ones. So tensors of a few MiB that are allocated
and freed leave hundreds of MiB behind. That would undo what offload and gathering of parameters save.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_VARIABLE: Final = "MALLOC_MMAP_THRESHOLD_"  # the user's setting of the threshold, mallopt(3)
_MMAP_THRESHOLD: Final = -3
_LARGE: Final = 1 << 20  # bytes


def give_back_freed_memory() -> None:
    """Return freed blocks of 1 MiB and more to the system from now on, and memory that is free now; only with glibc.

    Does nothing if the user has set the threshold.
    """
    if _VARIABLE in os.environ:
        return
    library = ctypes.CDLL(None)
    try:
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.malloc_trim(0)
    except AttributeError:
        pass

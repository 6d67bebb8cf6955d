"""How the C library keeps memory that has been freed.

glibc gives a block back to the system when it is freed only where it was larger than a threshold, which grows with what has
been freed, up to 32 MiB. Smaller ones stay, and since aligned blocks seldom fit the holes of freed ones, tensors of a few
MiB that come and go leave hundreds of MiB behind. Where whole parameters come and go, or tensors are put into files, to save
memory, that would undo it.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

_VARIABLE: Final = "MALLOC_MMAP_THRESHOLD_"  # the user's own setting of the same, mallopt(3)
_MMAP_THRESHOLD: Final = -3
_LARGE: Final = 1 << 20  # bytes


def give_back_freed_memory() -> None:
    """Let this process give blocks of 1 MiB and more back when they are freed, and what is free now; only with glibc.

    Nothing is changed where the user has set the threshold.
    """
    if _VARIABLE in os.environ:
        return
    library = ctypes.CDLL(None)
    try:
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.malloc_trim(0)
    except AttributeError:
        pass

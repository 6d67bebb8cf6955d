"""A check that all ranks have the same list of numbers.

The first rank broadcasts the length of its list, and then its contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from commprof import hooks
from zero_runtime.comm import DataParallelGroup

_CHECK: Final = hooks.tag("trace_check")


def same_as_first(numbers: Sequence[int], group: DataParallelGroup) -> bool:
    """Return whether ``numbers`` are equal to those of the first rank of ``group``.

    If the lengths differ, only the length is broadcast.
    """
    for mine in ([len(numbers)], numbers):
        theirs = torch.tensor(mine, dtype=torch.int64, device=group.device)
        group.broadcast(theirs, 0, why=_CHECK)
        if theirs.tolist() != list(mine):
            return False
    return True

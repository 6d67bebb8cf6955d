"""Computes by how much a recorded call increments a backend's sequence number.

The rules were measured for gloo (torch 2.13), and read from torch's sources for NCCL. gloo counts every
operation that it starts, including sends and receives. It counts a list reduce_scatter as one all_reduce for
each rank, and a coalesced reduce_scatter as one operation for each tensor. It counts each message of a
monitored_barrier. NCCL counts only collectives, and counts a coalescing block as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from commprof.recorder.process_group.groups import Group
from commprof.trace.rank_files.segments import count_of

GLOO: Final = "gloo"
NCCL: Final = "nccl"


def _list_reduce_scatter(group: Group, args: Sequence[Any]) -> int:
    return group.size - 1


def _coalesced_reduce_scatter(group: Group, args: Sequence[Any]) -> int:
    return len(args[0]) - 1 if args else 0


def _monitored_barrier(group: Group, args: Sequence[Any]) -> int:
    messages = 2 * (group.size - 1) if group.rank == 0 else 2
    return messages - 1


# For each ProcessGroup method, the number of operations that gloo counts in addition to one.
GLOO_EXTRA: Final[dict[str, Callable[[Group, Sequence[Any]], int]]] = {
    "reduce_scatter": _list_reduce_scatter,
    "reduce_scatter_tensor_coalesced": _coalesced_reduce_scatter,
    "reduce_scatter_single_coalesced": _coalesced_reduce_scatter,
    "monitored_barrier": _monitored_barrier,
}


def count_raised(group: Group) -> None:
    """Account for a call in ``group`` that raised.

    gloo checks the arguments before it counts a call. NCCL counts a call before it checks types and reductions,
    but after other checks. The next comparison of the numbers shows whether NCCL counted the call.
    """
    if set(group.backends.values()) == {GLOO}:
        group.extra -= 1
    else:
        group.raised += 1


def expected_number(group: Group) -> int | None:
    """Return the sequence number that the recorded calls explain; None if it is not known how the backend counts.

    ``group.extra`` is the sum of the differences from one count for each call. The differences are negative in
    a coalescing block and for a call that raised.
    """
    backends = set(group.backends.values())
    if backends == {GLOO}:
        return count_of(group.collectives) + count_of(group.messages) + group.extra
    if backends == {NCCL}:
        return count_of(group.collectives) + group.extra
    return None

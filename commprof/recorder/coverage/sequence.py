"""By how much one recorded call increments a backend's sequence number.

Measured for gloo (torch 2.13), read from torch's sources for NCCL. gloo counts every operation that it starts: sends and
receives too, a list reduce_scatter as one all_reduce per rank, a coalesced reduce_scatter as one per tensor, and a
monitored_barrier as its messages. NCCL counts collectives only, and a coalescing block as one.
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


# By ProcessGroup method: what gloo counts beyond one.
GLOO_EXTRA: Final[dict[str, Callable[[Group, Sequence[Any]], int]]] = {
    "reduce_scatter": _list_reduce_scatter,
    "reduce_scatter_tensor_coalesced": _coalesced_reduce_scatter,
    "reduce_scatter_single_coalesced": _coalesced_reduce_scatter,
    "monitored_barrier": _monitored_barrier,
}


def count_raised(group: Group) -> None:
    """A call in ``group`` raised. gloo checks its arguments before it counts the call.

    NCCL counts a call before it looks at types and reductions, and after other checks: the next comparison of the numbers
    tells which it was.
    """
    if set(group.backends.values()) == {GLOO}:
        group.extra -= 1
    else:
        group.raised += 1


def expected_number(group: Group) -> int | None:
    """The sequence number that the calls seen so far account for; None where the backend's counting is not known.

    ``group.extra`` is what was counted beyond (or, in a coalescing block or for a call that raised, below) one a call.
    """
    backends = set(group.backends.values())
    if backends == {GLOO}:
        return count_of(group.collectives) + count_of(group.messages) + group.extra
    if backends == {NCCL}:
        return count_of(group.collectives) + group.extra
    return None

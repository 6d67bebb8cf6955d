"""Corrects the numbers of calls in their groups. Standard library only.

A call that raised reached no other rank, so it must not count. The recorder assigns numbers before it knows which calls
raise, and other threads may already have taken the next numbers. The numbers are therefore corrected when a trace is
read: each number is reduced by the number of earlier calls of the group that raised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

# A process group, and whether the stream is its messages (True) or its collectives (False). Each is numbered from 0.
Stream: TypeAlias = tuple[str, bool]


def raised_numbers(
    raised: Iterable[tuple[int, int]], streams: Mapping[int, Stream]
) -> dict[Stream, list[int]]:
    """Return the numbers that the recorder assigned to calls that raised, in ascending order, by stream.

    Args:
        raised: The signature and the number of each call that raised.
        streams: The stream of each signature. A call of a signature that is not in ``streams`` is left out.
    """
    numbers: dict[Stream, set[int]] = {}
    for signature, number in raised:
        if signature in streams:
            numbers.setdefault(streams[signature], set()).add(number)
    return {stream: sorted(of_stream) for stream, of_stream in numbers.items()}


def issued_number(number: int, raised: Sequence[int], is_raised: bool) -> int:
    """Return the index of a call among the calls of its stream that did not raise.

    For a call that raised, the result is -1 - n, where n is the index of the next call. The result is equal on all
    ranks that raised at this call.

    Args:
        number: The number that the recorder assigned to the call.
        raised: The numbers of the calls of the stream that raised, in ascending order.
        is_raised: Whether the call itself raised.

    >>> [issued_number(n, [2], n == 2) for n in range(4)]
    [0, 1, -3, 2]
    """
    place = number - bisect_left(raised, number)
    return -1 - place if is_raised else place

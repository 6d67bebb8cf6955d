"""The numbers of calls in their groups. A call that raised reached no other rank, so it gets no number. Standard
library only.

The recorder hands out numbers before it knows which calls raise. Other threads may have taken the next ones by then, so
the numbers are corrected when a trace is read: each is reduced by the number of earlier calls of its group that raised.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

# A process group, and whether its messages or its collectives: each are numbered from 0.
Stream: TypeAlias = tuple[str, bool]


def raised_numbers(
    raised: Iterable[tuple[int, int]], streams: Mapping[int, Stream]
) -> dict[Stream, list[int]]:
    """The numbers that the recorder gave to calls that raised, in order.

    Args:
        raised: of each such call its signature and its number.
        streams: by signature. A call of another signature is left out.
    """
    numbers: dict[Stream, set[int]] = {}
    for signature, number in raised:
        if signature in streams:
            numbers.setdefault(streams[signature], set()).add(number)
    return {stream: sorted(of_stream) for stream, of_stream in numbers.items()}


def issued_number(number: int, raised: Sequence[int], is_raised: bool) -> int:
    """The place of a call among those of its stream that did not raise.

    For a call that raised -1 - n, where n is the number of the next call: equal on all ranks that raised there.

    Args:
        number: as the recorder gave it.
        raised: the numbers of the calls of the stream that raised, in order.
        is_raised: the call is one of these.

    >>> [issued_number(n, [2], n == 2) for n in range(4)]
    [0, 1, -3, 2]
    """
    place = number - bisect_left(raised, number)
    return -1 - place if is_raised else place

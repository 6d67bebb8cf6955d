"""Whether messages are so small at a number of ranks that latency takes longer than the transfer.

A ring moves one chunk, a message divided by its ranks, in each of its steps. A calibration gives the time of a message of S
bytes as alpha + S / beta on n ranks. Both terms are equal where a chunk has alpha * beta / n bytes, and this is assumed
to hold at other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from commprof.calibration.results import Calibration
from commprof.plan.traffic import Traffic
from commprof.schema import Purpose


class Chunk(NamedTuple):
    """The chunk of the largest gradient message.

    Attributes:
        op: of the message.
        message_bytes: its payload.
        group_size: ranks that share it.
        least_bytes: the chunk whose latency and transfer take equally long.
    """

    op: str
    message_bytes: int
    group_size: int
    least_bytes: float

    @property
    def num_bytes(self) -> float:
        """Bytes of the chunk of one owner."""
        return self.message_bytes / self.group_size

    @property
    def most_ranks(self) -> int:
        """Ranks up to which the message is bandwidth bound."""
        return int(self.message_bytes / self.least_bytes)


def gradient_chunk(traffic: Iterable[Traffic], calibration: Calibration) -> Chunk | None:
    """Return the chunk of the largest gradient message; None without one, or without a latency of its operation."""
    reduced = [
        row for row in traffic if row.purpose == Purpose.GRADIENT_REDUCE and row.sizes and row.group_size > 1
    ]
    if not reduced:
        return None
    largest = max(reduced, key=lambda row: max(row.sizes))
    fitted = calibration.fits().get(largest.op)
    if fitted is None or not fitted.alpha_ns > 0:
        return None
    least = fitted.alpha_ns / fitted.slope / calibration.world_size
    return Chunk(largest.op, max(largest.sizes), largest.group_size, least)

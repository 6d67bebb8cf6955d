"""The part of ``commprof report`` about the algorithms and protocols that NCCL chose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows

_MOST: Final = 12
_HEADINGS: Final = (
    Heading("operation"),
    Heading("group"),
    Heading("payload", number=True),
    Heading("algorithm"),
    Heading("protocol"),
    Heading("channels", number=True),
    Heading("calls", number=True),
    Heading("time", number=True),
    Heading("busbw", number=True),
)
_HINT: Final = (
    "time: median on the device, including the wait for late ranks; busbw: bus bandwidth for that time (nccl-tests). "
    "A dash: not known."
)


def algorithm_parts(rows: Sequence[Mapping[str, Any]]) -> list[Rows | str]:
    """Return the table of the algorithms that moved the most payload; empty if no log contains algorithms."""
    if not rows:
        return []
    cells: list[tuple[str, ...]] = [
        (
            rendering.text(row["op"]),
            rendering.text(row["group_ranks"] or row["group_desc"]),
            rendering.number_of_bytes(row["payload_bytes"]),
            rendering.text(row["algorithm"]),
            rendering.text(row["protocol"]),
            rendering.text(row["channels"]),
            rendering.count(row["collectives"]),
            rendering.duration(row["time_ns"]),
            _rate(row["busbw_bytes_per_s"]),
        )
        for row in rows[:_MOST]
    ]
    if rows[_MOST:]:
        blank = [""] * (len(_HEADINGS) - 1)
        cells.append((f"and {len(rows) - _MOST} more: --json lists them", *blank))
    return [
        Rows(_HEADINGS, cells, title="Algorithms that NCCL chose, in the whole run"),
        rendering.paragraph(_HINT) + "\n",
    ]


def _rate(rate: float | None) -> str:
    return rendering.MISSING if rate is None or rendering.is_missing(rate) else f"{rate / 1e9:.2f} GB/s"

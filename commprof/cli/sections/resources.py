"""The part of ``commprof report`` about resources: memory, CPU cores and GPU utilization over the steps."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, Final

from commprof.cli import rendering
from commprof.cli.rendering import Heading, Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_HEADINGS: Final = (
    Heading("resource"),
    Heading("median", number=True),
    Heading("largest", number=True),
    Heading("first step", number=True),
    Heading("last step", number=True),
)


def resource_parts(rows: Sequence[Mapping[str, Any]]) -> list[Rows | str]:
    """Return the table of the resources of the steps that ended; empty if no resource is known.

    The median and the largest value are those of the warm steps. The first and the last step are those of all steps.

    Args:
        rows: The answer of ``api.resource_use``.
    """
    from commprof.analysis.traffic.steady_steps import warm_steps

    # These are the steps that the means of traffic use. A step in which a run failed has no duration.
    rows = [row for row in rows if not rendering.is_missing(row["duration_ns"])]
    warm = set(warm_steps([(row["attempt"], row["step"]) for row in rows]))
    later = [row for row in rows if (row["attempt"], row["step"]) in warm]
    cells = [
        _cells(name, [row[column] for row in rows], [row[column] for row in later], shown)
        for name, column, shown in _LINES
        if any(not rendering.is_missing(row[column]) for row in rows)
    ]
    if not cells:
        return []
    which = f"{len(later)} step{'' if len(later) == 1 else 's'}" + (
        " after the first" if len(later) < len(rows) else ""
    )
    return [Rows(_HEADINGS, cells, f"Resources over the run, {which}")]


def _cells(
    name: str, every: Sequence[Any], later: Sequence[Any], shown: Callable[[Any], str]
) -> tuple[str, ...]:
    known = [value for value in later if not rendering.is_missing(value)]
    middle = shown(median(known)) if known else rendering.MISSING
    largest = shown(max(known)) if known else rendering.MISSING
    first, last = (rendering.MISSING if rendering.is_missing(v) else shown(v) for v in (every[0], every[-1]))
    return name, middle, largest, first, last


def _bytes(value: float) -> str:
    return rendering.number_of_bytes(round(value))


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _cores(value: float) -> str:
    return f"{value:.2f}"


_LINES: Final = (
    ("resident memory, largest rank", "rss_bytes", _bytes),
    ("device memory, largest rank", "device_bytes", _bytes),
    ("cores busy, mean rank", "cores", _cores),
    ("GPU utilisation", "gpu_share", _percent),
)

"""Arrivals: when each rank issued each collective, on one clock, and for which rank the others waited."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from commprof.align.ranks.cpp_waits import CppWaits
from commprof.align.ranks.rank_arrivals import arrivals as align
from commprof.align.ranks.reference_clock import ReferenceClock
from commprof.analysis.columns.answers import ARRIVALS
from commprof.analysis.columns.frames import from_arrow
from commprof.trace.reader import Run


def arrivals(collectives: pa.Table, clocks: pa.Table, offsets: pa.Table, one_host: bool) -> pa.Table:
    """Return one row per record that can be matched with records of other ranks.

    See :func:`commprof.align.ranks.rank_arrivals.arrivals`.

    Args:
        one_host: Treat processes that recorded no clock as processes that share one clock.
    """
    return align(collectives, ReferenceClock(clocks.to_pylist(), offsets.to_pylist(), one_host))


def reference_clock(run: Run) -> ReferenceClock:
    """Return the clock of ``run``.

    If the run has one host, processes that recorded no clock are treated as processes that share one clock.
    """
    return ReferenceClock(
        run.table("clocks").to_pylist(),
        run.table("clock_offsets").to_pylist(),
        one_host=len(run.manifest.hosts) < 2,
    )


def cpp_waits(run: Run) -> CppWaits | None:
    """Return the waits in C++ in the processes of ``run``, or None if the run has none."""
    stalls = run.table("stalls")
    return CppWaits(stalls) if len(stalls) else None


def hosts_of(run: Run) -> dict[int, str]:
    """Return the host of each rank of ``run``, if it is known."""
    return {row["rank"]: row["host"] for row in run.table("clocks").to_pylist()}


def aligned(run: Run, also: Sequence[str] = ()) -> Callable[[pa.Table], pa.Table]:
    """Return a function that converts records of ``run`` to their arrivals.

    See :func:`commprof.align.ranks.rank_arrivals.arrivals`.
    """
    clock = reference_clock(run)
    return lambda records: align(records, clock, also)


def arrivals_frame(arrived: pa.Table) -> pd.DataFrame:
    """Return the table of :func:`arrivals` as a DataFrame."""
    return from_arrow(arrived, ARRIVALS.columns)


def incomparable(arrived: pa.Table) -> int:
    """Return the number of collectives of several recorded ranks whose times cannot be compared."""
    unknown = pc.is_null(arrived["lateness_ns"])
    if not pc.any(unknown).as_py():
        return 0
    several = pc.and_(pc.greater(arrived["members"], 1), unknown)
    return int(pc.count_distinct(arrived["collective"].filter(several)).as_py())

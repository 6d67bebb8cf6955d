"""Arrivals: when each rank issued each collective, on one clock, and which rank the others wait for."""

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
    """One row per record that can have partners (:func:`commprof.align.ranks.rank_arrivals.arrivals`).

    ``one_host``: processes that left no clock count as sharing one.
    """
    return align(collectives, ReferenceClock(clocks.to_pylist(), offsets.to_pylist(), one_host))


def reference_clock(run: Run) -> ReferenceClock:
    """The clock of ``run``: of one host, processes that left no clock count as sharing one."""
    return ReferenceClock(
        run.table("clocks").to_pylist(),
        run.table("clock_offsets").to_pylist(),
        one_host=len(run.manifest.hosts) < 2,
    )


def cpp_waits(run: Run) -> CppWaits | None:
    """When C++ waited in the processes of ``run``; None where it did not."""
    stalls = run.table("stalls")
    return CppWaits(stalls) if len(stalls) else None


def hosts_of(run: Run) -> dict[int, str]:
    """The host of each rank of ``run``, as far as it is known."""
    return {row["rank"]: row["host"] for row in run.table("clocks").to_pylist()}


def aligned(run: Run, also: Sequence[str] = ()) -> Callable[[pa.Table], pa.Table]:
    """A function from records of ``run`` to their arrivals (:func:`commprof.align.ranks.rank_arrivals.arrivals`)."""
    clock = reference_clock(run)
    return lambda records: align(records, clock, also)


def arrivals_frame(arrived: pa.Table) -> pd.DataFrame:
    """:func:`arrivals` as a frame."""
    return from_arrow(arrived, ARRIVALS.columns)


def incomparable(arrived: pa.Table) -> int:
    """How many collectives of several recorded ranks have times that cannot be compared."""
    unknown = pc.is_null(arrived["lateness_ns"])
    if not pc.any(unknown).as_py():
        return 0
    several = pc.and_(pc.greater(arrived["members"], 1), unknown)
    return int(pc.count_distinct(arrived["collective"].filter(several)).as_py())
